"""Progress on the terminal: a bar with the time left for the table, one for each run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from smat.experiments.engine import Outcome
from smat.experiments.run import Run
from smat.training import Progress as Step


class Display:
    """Shows the bars, and a line for each run that ends."""

    def __init__(self, runs: Sequence[Run], console: Console) -> None:
        self.num_runs, self.num_finished = len(runs), 0
        self.steps_left = {run.key: run.training.steps for run in runs}
        self.num_steps = sum(self.steps_left.values())
        self.steps_made = 0  # by this command, and not before an interruption
        self.start = time.monotonic()
        self.rows: dict[str, TaskID] = {}
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            refresh_per_second=2,
        )
        self.table = self.bars.add_task("", total=self.num_steps, note="")
        self._move_table()

    def __enter__(self) -> Display:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def progressed(self, run: Run, progress: Step) -> None:
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
        score = None if progress.accuracy is None else f"{progress.accuracy:.1f} %"
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
            result = f"{run.name}: {record['accuracy']:.1f} % in {taken}"
            line = f"{self.num_finished}/{self.num_runs}  {result}"
            self.say(", ".join(filter(None, [line, left_text(self.seconds_left())])))
        self._move_table()

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the bars, never broken into two."""
        self.bars.console.print(escape(text), style=style, highlight=False, soft_wrap=True)

    def seconds_left(self) -> float | None:
        """Guess the time until the last run ends, from the steps made so far."""
        if not self.steps_made:
            return None
        seconds_a_step = (time.monotonic() - self.start) / self.steps_made
        return seconds_a_step * sum(self.steps_left.values())

    def _move_table(self) -> None:
        heading = f"[bold]{self.num_finished} of {self.num_runs} runs"
        completed = self.num_steps - sum(self.steps_left.values())
        left = left_text(self.seconds_left())
        self.bars.update(self.table, description=heading, completed=completed, note=left)


def left_text(seconds: float | None) -> str:
    """Say how long it still takes.

    >>> left_text(3725), left_text(0.4), left_text(0), left_text(None)
    ('1:02:05 left', '0:00:01 left', '', '')
    """
    return f"{timedelta(seconds=max(1, round(seconds)))} left" if seconds else ""
