"""Make one run in this process, and say in one line what became of it."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from smat.experiments.plain import disagreement
from smat.experiments.records import make_record
from smat.experiments.run import Run
from smat.machine import keep_freed_memory
from smat.tasks.task import seed_of
from smat.training import Interrupted, Progress, train
from smat.training.fabric import make_fabric
from smat.training.files import write_atomically

# What a user can act on needs no traceback.
EXPECTED = (ValueError, OSError, ArithmeticError, ImportError)


class BusyError(Exception):
    """Another process is making this run."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        run: The run.
        kind: "finished", "failed", "stopped" (asked to, and resumable) or "busy" (elsewhere).
        record: Of a finished run.
        message: One line that says what went wrong.
        is_fatal: The next run would fail in the same way.
    """

    run: Run
    kind: Literal["finished", "failed", "stopped", "busy"]
    record: dict[str, Any] | None = None
    message: str = ""
    is_fatal: bool = False


def attempt(
    run: Run,
    folder: Path,
    *,
    device: str = "auto",
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Make a run, or go on with it; whatever goes wrong becomes one line."""
    try:
        record = execute(
            run, folder, device=device, on_progress=on_progress, should_stop=should_stop
        )
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
        return Outcome(run, "failed", message=_unexpected(error, folder))


def execute(
    run: Run,
    folder: Path,
    *,
    device: str = "auto",
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> dict[str, Any]:
    """Train a run's model in its folder and return the record."""
    keep_freed_memory()
    if should_stop is not None and should_stop():
        raise Interrupted(0)
    with claim(folder):
        _check_folder(run, folder)
        # Before the model, whose building may already take products that bf16 must be guarded in.
        fabric = make_fabric(device, run.training.precision)
        torch.manual_seed(seed_of("model", run.seed))
        result = train(
            build(run),
            run.task,
            run.training,
            folder,
            seed=run.seed,
            on_progress=on_progress,
            should_stop=should_stop,
            fabric=fabric,
        )
        return make_record(run, result, str(fabric.device))


def build(run: Run) -> nn.Module:
    """Build a run's model, with freshly drawn weights."""
    return run.model.build(run.task)


@contextlib.contextmanager
def claim(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder; the system lets go when this process ends, anyhow."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # a system without such locks trusts its user
        yield
        return
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"another process is at work in {folder}") from None
        yield


def _check_folder(run: Run, folder: Path) -> None:
    """Write down whose folder it is; refuse that of a run with other settings."""
    path = folder / "run.json"
    if path.exists():
        difference = disagreement(json.loads(path.read_text()), run.settings())
        if difference is not None:
            raise ValueError(
                f"{folder} holds a run with other settings ({difference}); to start anew: "
                f"rm -r {folder}"
            )
    write_atomically(path, json.dumps(run.to_dict(), indent=1).encode())


def _unexpected(error: Exception, folder: Path) -> str:
    """Keep the traceback beside the run, and name the file."""
    brief = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    path = folder / "error.txt"
    with contextlib.suppress(OSError):
        path.write_text("".join(traceback.format_exception(error)))
        return f"{brief} (traceback in {path})"
    return brief
