"""Progress on the terminal: bars of runs at work, and a line for each that ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TaskID
from rich.progress import Progress as Bars

from smat.experiments.engine import Outcome
from smat.experiments.run import Run
from smat.training import Progress


class Display:
    """Shows the bars, and a line for each run that ends."""

    def __init__(self, runs: Sequence[Run], console: Console) -> None:
        self.num_runs, self.num_finished = len(runs), 0
        self.steps_left = {run.key: run.training.steps for run in runs}
        self.num_steps = sum(self.steps_left.values())
        self.steps_made = 0  # by this command, and not before an interruption
        self.start = time.monotonic()
        self.rows: dict[str, TaskID] = {}
        self.bars = Bars(
            SpinnerColumn(), "{task.description}", BarColumn(), "{task.percentage:>3.0f} %",
            "{task.fields[note]}", console=console, transient=True, refresh_per_second=2,
        )  # fmt: skip
        self.table = self.bars.add_task("", total=self.num_steps, note="")
        self._move_table()

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def progressed(self, run: Run, progress: Progress) -> None:
        """Move the bars."""
        if progress.message:
            self.say(f"{run.name}: {progress.message}", "yellow")
        left = progress.steps - progress.step
        if run.key in self.rows:
            self.steps_made += self.steps_left[run.key] - left
        else:
            self.rows[run.key] = self.bars.add_task(run.name, total=progress.steps, note="")
        self.steps_left[run.key] = left
        loss = None if progress.loss is None else f"loss {progress.loss:.4g}"
        score = None if progress.accuracy is None else _result(run, progress.accuracy)
        note = ", ".join(filter(None, [loss, score]))
        self.bars.update(self.rows[run.key], completed=progress.step, note=note)
        self._move_table()

    def ended(self, outcome: Outcome) -> None:
        """Say what became of a run."""
        run, record = outcome.run, outcome.record
        left = self.steps_left.pop(run.key)
        if run.key in self.rows:
            self.bars.remove_task(self.rows.pop(run.key))
        if record is None:
            style = "red" if outcome.kind == "failed" else "yellow"
            self.say(f"{outcome.kind}: {run.name}: {outcome.message}", style)
        else:
            self.num_finished += 1
            self.steps_made += left
            minutes = record["minutes"]
            taken = f"{minutes:.1f} min" if minutes >= 1 else f"{60 * minutes:.0f} s"
            result = f"{run.name}: {_result(run, record['accuracy'])} in {taken}"
            line = f"{self.num_finished}/{self.num_runs}  {result}"
            self.say(f"{line}, {self.left_text()}" if self.left_text() else line)
        self._move_table()

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the bars, never broken into two."""
        self.bars.console.print(escape(text), style=style, highlight=False, soft_wrap=True)

    def left_text(self) -> str:
        """Guess the time until the last run ends, from the steps made so far: '1:02:05 left'."""
        num_left = sum(self.steps_left.values())
        if not self.steps_made or not num_left:
            return ""
        seconds = (time.monotonic() - self.start) / self.steps_made * num_left
        return f"{timedelta(seconds=max(1, round(seconds)))} left"

    def _move_table(self) -> None:
        heading = f"[bold]{self.num_finished} of {self.num_runs} runs"
        completed = self.num_steps - sum(self.steps_left.values())
        note = self.left_text()
        self.bars.update(self.table, description=heading, completed=completed, note=note)


def _result(run: Run, value: float) -> str:
    """Write a result in the unit of the run's task."""
    unit = run.task.unit
    return f"{value:.{1 if unit == '%' else 3}f} {unit}"
