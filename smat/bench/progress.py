"""A progress bar with the time left, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class ProgressBar:
    """Shows a benchmark's progress as one bar with the time left."""

    def __init__(self, bar: Progress, name: str) -> None:
        self.bar = bar
        self.task = bar.add_task(name, total=0.0, what="checking")

    def expect(self, amount: float) -> None:
        """Lengthen the bar."""
        total = self.bar.tasks[self.task].total or 0.0
        self.bar.update(self.task, total=total + amount)

    def done(self, amount: float, what: str) -> None:
        """Fill the bar."""
        self.bar.update(self.task, advance=amount, what=what)


@contextmanager
def progress_bar(name: str) -> Iterator[ProgressBar]:
    """Show a bar on the error stream until the work is done."""
    # Costs are estimates, so the time left is averaged over a long while.
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"), TimeElapsedColumn(), TextColumn("left"),
        TimeRemainingColumn(), TextColumn("{task.fields[what]}"),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, speed_estimate_period=900, refresh_per_second=1
    ) as bar:
        yield ProgressBar(bar, name)
