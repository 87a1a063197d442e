"""Make runs and keep their records; what every engine does with a run, and the simplest engine."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from smat.experiments.run import Run
from smat.experiments.store import BusyError, Store, claim, make_record, sign_folder
from smat.machine import keep_freed_memory
from smat.tasks.task import seed_of
from smat.training import Interrupted, Progress, train
from smat.training.checkpoint import remove_checkpoints
from smat.training.fabric import make_fabric

# What a user can act on needs no traceback.
EXPECTED = (ValueError, OSError, ArithmeticError, ImportError)

ShouldStop = Callable[[], bool]
OnProgress = Callable[[Run, Progress], None]


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    run: Run
    kind: Literal["finished", "failed", "stopped", "busy"]  # busy: another process makes it
    record: dict[str, Any] | None = None  # of a finished run
    message: str = ""  # one line that says what went wrong
    is_fatal: bool = False  # the next run would fail in the same way


class Engine(Protocol):
    """Makes runs somewhere."""

    def make(
        self, runs: Iterable[Run], store: Store, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
        """Make the runs in their folders and yield what becomes of each, in the order of ending.

        Once `should_stop` says so, no run is begun and those at work keep what they have.
        """


class Listener(Protocol):
    """Is told what happens."""

    def progressed(self, run: Run, progress: Progress) -> None:
        """A run has come further."""

    def ended(self, outcome: Outcome) -> None:
        """A run has ended, one way or another."""


def run_all(
    runs: Sequence[Run],
    store: Store,
    engine: Engine,
    *,
    listener: Listener,
    should_stop: ShouldStop,
    again: bool = False,
) -> list[Outcome]:
    """Make the runs that are not finished, or all of them `again`, and write their records.

    A run that fails does not keep the others from being made, unless they would fail alike.
    """
    outcomes: list[Outcome] = []

    def stops() -> bool:
        return should_stop() or any(outcome.is_fatal for outcome in outcomes)

    # Looked up again for each: another command may have finished it meanwhile.
    waiting = (run for run in runs if again or store.find(run) is None)
    for outcome in engine.make(waiting, store, listener.progressed, stops):
        if outcome.record is not None:
            try:
                store.write(outcome.run, outcome.record)
                remove_checkpoints(store.folder(outcome.run))  # only now of no more use
            except OSError as error:
                outcome = Outcome(outcome.run, "failed", message=str(error), is_fatal=True)
        outcomes.append(outcome)
        listener.ended(outcome)
    return outcomes


def attempt(
    run: Run,
    folder: Path,
    device: str = "auto",
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: ShouldStop | None = None,
) -> Outcome:
    """Make a run in this process, or go on with it; whatever goes wrong becomes one line."""
    try:
        return Outcome(run, "finished", execute(run, folder, device, on_progress, should_stop))
    except Interrupted as stop:
        return Outcome(run, "stopped", message=str(stop))
    except BusyError as error:
        return Outcome(run, "busy", message=str(error))
    except EXPECTED as error:
        # A disk or an installation that fails one run fails the next as well.
        is_fatal = isinstance(error, ImportError | OSError)
        return Outcome(run, "failed", message=" ".join(str(error).split()), is_fatal=is_fatal)
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        with contextlib.suppress(OSError):
            path = folder / "error.txt"
            path.write_text("".join(traceback.format_exception(error)))
            message += f" (traceback in {path})"
        return Outcome(run, "failed", message=message)


def execute(
    run: Run,
    folder: Path,
    device: str = "auto",
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: ShouldStop | None = None,
) -> dict[str, Any]:
    """Train a run's model in its folder and return the record."""
    keep_freed_memory()
    if should_stop is not None and should_stop():
        raise Interrupted(0)
    with claim(folder):
        sign_folder(run, folder)
        # Before the model, whose building may already take products that bf16 must be guarded in.
        fabric = make_fabric(device, run.training.precision)
        torch.manual_seed(seed_of("model", run.seed))
        result = train(
            run.model.build(run.task), run.task, run.training, folder, seed=run.seed,
            on_progress=on_progress, should_stop=should_stop, fabric=fabric,
        )  # fmt: skip
        return make_record(run, result, str(fabric.device))


@dataclass
class SerialEngine:
    """One run after another, in this process."""

    device: str = "auto"

    def make(
        self, runs: Iterable[Run], store: Store, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
        """See `Engine`."""
        for run in runs:
            if should_stop():
                return

            def tell(progress: Progress, run: Run = run) -> None:
                on_progress(run, progress)

            yield attempt(run, store.folder(run), self.device, tell, should_stop)


def now_and_then(ask: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """Ask a dear question no more often than every so many seconds.

    >>> ask = now_and_then(iter([False, True]).__next__, seconds=1000)
    >>> ask(), ask()
    (False, False)
    """
    last = -seconds
    answer = False

    def asked() -> bool:
        nonlocal last, answer
        if not answer and time.monotonic() - last >= seconds:
            last, answer = time.monotonic(), ask()
        return answer

    return asked
