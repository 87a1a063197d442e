"""Make runs and keep their records; what every engine does with a run, and the simplest engine."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from smat.experiments.run import Run
from smat.experiments.store import BusyError, Store, claim, make_record, sign_folder
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


# Makes runs in their folders and yields what becomes of each, in the order of ending; once told to
# stop, it begins no run, and those at work keep what they have.
Engine = Callable[[Iterable[Run], Store, OnProgress, ShouldStop], Iterator[Outcome]]


def run_all(
    runs: Iterable[Run],
    store: Store,
    engine: Engine,
    on_progress: OnProgress,
    should_stop: ShouldStop,
    again: bool = False,
) -> Iterator[Outcome]:
    """Make the runs that are not finished, or all of them `again`, and write their records.

    A run that fails does not keep the others from being made, unless they would fail alike.
    """
    is_fatal = False

    def stops() -> bool:
        return is_fatal or should_stop()

    # Looked up again for each: another command may have finished it meanwhile.
    waiting = (run for run in runs if again or store.find(run) is None)
    for outcome in engine(waiting, store, on_progress, stops):
        if outcome.record is not None:
            try:
                store.write(outcome.run, outcome.record)
                remove_checkpoints(store.folder(outcome.run))  # only now of no more use
            except OSError as error:
                outcome = Outcome(outcome.run, "failed", message=str(error), is_fatal=True)
        is_fatal |= outcome.is_fatal
        yield outcome


def attempt(
    run: Run,
    folder: Path,
    device: str,
    on_progress: Callable[[Progress], None],
    should_stop: ShouldStop,
    strategy: str = "auto",
    num_devices: int = 1,
) -> Outcome:
    """Make a run in this process, or go on with it; whatever goes wrong becomes one line.

    Of several processes, one to a device, the first keeps the folder and the record.
    """
    try:
        if should_stop():
            raise Interrupted(0)
        with claim(folder) if is_first_process() else contextlib.nullcontext():
            if is_first_process():
                sign_folder(run, folder)
            # Before the model, whose building may take products that bf16 must be guarded in.
            options = {"strategy": strategy, "num_devices": num_devices}
            fabric = make_fabric(device, run.training.precision, **options)  # type: ignore[arg-type]
            torch.manual_seed(seed_of("model", run.seed))
            result = train(
                run.model.build(run.task), run.task, run.training, folder, seed=run.seed,
                on_progress=on_progress, should_stop=should_stop, fabric=fabric,
                sharded=strategy == "fsdp", over_heads=strategy == "tensor",
            )  # fmt: skip
            record = make_record(run, result, str(fabric.device)) if is_first_process() else None
            return Outcome(run, "finished", record)
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


def is_first_process() -> bool:
    """Whether this is the only process of a run, or the first that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


@dataclass
class SerialEngine:
    """One run after another, in this process."""

    device: str = "auto"
    strategy: str = "auto"
    num_devices: int = 1

    def __call__(
        self, runs: Iterable[Run], store: Store, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
        for run in runs:
            if should_stop():
                return
            tell = partial(on_progress, run)
            devices = self.strategy, self.num_devices
            yield attempt(run, store.folder(run), self.device, tell, should_stop, *devices)


def now_and_then(ask: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """Ask a dear question no more often than every so many seconds.

    >>> ask = now_and_then(iter([False, True]).__next__, seconds=1000)
    >>> ask(), ask()
    (False, False)
    """
    next_time, answer = 0.0, False

    def asked() -> bool:
        nonlocal next_time, answer
        if not answer and time.monotonic() >= next_time:
            answer, next_time = ask(), time.monotonic() + seconds
        return answer

    return asked
