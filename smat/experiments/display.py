"""Progress on the terminal: a bar with the time left for the table, and one for each run."""

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


class Clock:
    """Guesses the time left from the pace of the steps so far.

    A run not yet begun is taken to be as fast as those of its arm, else as the average.
    """

    def __init__(self, runs: Sequence[Run], num_parallel: int = 1) -> None:
        self.left = {run.key: (run.arm, run.training.steps) for run in runs}
        self.num_parallel = num_parallel
        self.paces: dict[str, float] = {}  # seconds a step, by arm
        self._begun: dict[str, tuple[float, int] | None] = {}

    def learn(self, arm: str, seconds_a_step: float) -> None:
        """Take in how fast an arm is, from a record or from a run."""
        self.paces[arm] = seconds_a_step

    def advance(self, run: Run, step: int, now: float) -> None:
        """Take in where a run is; its first steps, which set things up, are not its pace."""
        self.left[run.key] = (run.arm, run.training.steps - step)
        if run.key not in self._begun:
            self._begun[run.key] = None
            return
        begin = self._begun[run.key]
        if begin is None:
            self._begun[run.key] = (now, step)
        elif step > begin[1]:
            self.learn(run.arm, (now - begin[0]) / (step - begin[1]))

    def end(self, run: Run) -> None:
        """Take a run out."""
        self.left.pop(run.key, None)

    def seconds_left(self, run: Run) -> float | None:
        """Guess the time that one run still takes; None if nothing is known yet."""
        return self._seconds(*self.left.get(run.key, (run.arm, 0))) if self.paces else None

    def all_seconds_left(self) -> float | None:
        """Guess the time until the last run ends."""
        if not self.paces:
            return None
        each = [self._seconds(arm, steps) for arm, steps in self.left.values()]
        return max(max(each, default=0.0), sum(each) / self.num_parallel)

    def _seconds(self, arm: str, steps: int) -> float:
        mean = sum(self.paces.values()) / len(self.paces)
        return steps * self.paces.get(arm, mean)


class Display:
    """Shows the bars, and a line for each run that ends."""

    def __init__(self, runs: Sequence[Run], clock: Clock, console: Console) -> None:
        self.runs, self.clock, self.console = list(runs), clock, console
        self.num_finished = 0
        self.rows: dict[str, TaskID] = {}
        self.steps: dict[str, int] = {}
        self.bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[note]}"),
            console=console,
            transient=True,
            refresh_per_second=2,
        )
        total = sum(run.training.steps for run in self.runs)
        self.table = self.bars.add_task("", total=total, left="", note="")
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
        self.clock.advance(run, progress.step, time.monotonic())
        self.steps[run.key] = progress.step
        if run.key not in self.rows:
            row = self.bars.add_task(run.name, total=progress.steps, left="", note="")
            self.rows[run.key] = row
        loss = None if progress.loss is None else f"loss {progress.loss:.4g}"
        score = None if progress.accuracy is None else f"{progress.accuracy:.1f} %"
        note = ", ".join(filter(None, [loss, score]))
        left = left_text(self.clock.seconds_left(run))
        self.bars.update(self.rows[run.key], completed=progress.step, left=left, note=note)
        self._move_table()

    def ended(self, outcome: Outcome) -> None:
        """Say what became of a run."""
        run, record = outcome.run, outcome.record
        self.clock.end(run)
        self.steps[run.key] = run.training.steps
        if run.key in self.rows:
            self.bars.remove_task(self.rows.pop(run.key))
        if record is None:
            style = "red" if outcome.kind == "failed" else "yellow"
            self.say(f"{outcome.kind}: {run.name}: {outcome.message}", style)
        else:
            self.num_finished += 1
            self.clock.learn(run.arm, 1 / record["steps_per_second"])
            minutes = record["minutes"]
            taken = f"{minutes:.1f} min" if minutes >= 1 else f"{60 * minutes:.0f} s"
            result = f"{run.name}: {record['accuracy']:.1f} % in {taken}"
            left = left_text(self.clock.all_seconds_left())
            line = f"{self.num_finished}/{len(self.runs)}  {result}"
            self.say(", ".join(filter(None, [line, left])))
        self._move_table()

    def say(self, text: str, style: str = "") -> None:
        """Print a line above the bars, never broken into two."""
        self.bars.console.print(escape(text), style=style, highlight=False, soft_wrap=True)

    def _move_table(self) -> None:
        left = left_text(self.clock.all_seconds_left())
        heading = f"[bold]{self.num_finished} of {len(self.runs)} runs"
        completed = sum(self.steps.values())
        self.bars.update(self.table, description=heading, completed=completed, left=left)


def left_text(seconds: float | None) -> str:
    """Say how long it still takes.

    >>> left_text(3725), left_text(0.4), left_text(0), left_text(None)
    ('1:02:05 left', '0:00:01 left', '', '')
    """
    return f"{timedelta(seconds=max(1, round(seconds)))} left" if seconds else ""
