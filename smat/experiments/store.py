"""Where runs live: work in progress, records of finished runs, and records of the repository."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from smat.experiments.run import Run
from smat.machine import PACKAGE, describe_hardware, source_commit
from smat.training.checkpoint import CURRENT, PREVIOUS, newest_step, write_atomically

VERSION = 1
COMMITTED = PACKAGE.parent / "results"  # only a checkout has it


class BusyError(Exception):
    """Another process is making this run."""


class Counts(NamedTuple):
    """How many runs a preset has, how many are finished, and of how many a record is shipped."""

    runs: int
    finished: int
    shipped: int


@dataclass(frozen=True)
class Store:
    """The folders of runs and records."""

    root: Path  # where runs work (runs/) and leave records (records/)
    committed: Path = COMMITTED  # records that came with the source, read and never written
    use_shipped: bool = False  # whether those count as finished runs

    @property
    def roots(self) -> list[Path]:
        """Folders of records, own first."""
        return [self.root, self.committed]

    def folder(self, run: Run) -> Path:
        """Where a run keeps checkpoints and logs."""
        return self.root.absolute() / "runs" / run.experiment / run.key

    def path(self, run: Run) -> Path:
        """Where a run's record goes."""
        return self.root / "records" / _place(run)

    def find(self, run: Run) -> dict[str, Any] | None:
        """Return the record of this very run; None if it is yet to be made."""
        own = _read(self.path(run), run)
        return self.find_shipped(run) if own is None and self.use_shipped else own

    def find_shipped(self, run: Run) -> dict[str, Any] | None:
        """Return the record of this very run that came with the source, if there is one."""
        return _read(self.committed / _place(run), run)

    def unfinished(self, runs: Iterable[Run]) -> list[Run]:
        """Keep the runs that have no record."""
        return [run for run in runs if self.find(run) is None]

    def count(self, runs: Sequence[Run]) -> Counts:
        """Count what `smat list` and `smat status` tell."""
        shipped = sum(self.find_shipped(run) is not None for run in runs)
        return Counts(len(runs), len(runs) - len(self.unfinished(runs)), shipped)

    def set_aside(self, runs: Iterable[Run]) -> None:
        """Rename the records of runs that are to be made again, so that none looks finished."""
        for run in runs:
            if (path := self.path(run)).exists():
                path.replace(path.with_suffix(".previous"))

    def write(self, run: Run, record: Mapping[str, Any]) -> Path:
        """Write a record whole."""
        path = self.path(run)
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
        return path

    def work_in_progress(self, experiment: str = "*") -> Iterator[str]:
        """Yield a line for each run that is at work or was interrupted."""
        for path in sorted((self.root / "runs").glob(f"{experiment}/*/run.json")):
            folder, kind = path.parent, "interrupted"
            try:
                with claim(folder):
                    pass
            except BusyError:
                kind = "running"
            if kind == "running" or any((folder / name).exists() for name in (CURRENT, PREVIOUS)):
                run, step = json.loads(path.read_text()), newest_step(folder)
                name = " ".join(run[part] for part in ("experiment", "preset", "arm", "cell"))
                kept = f"step {step} of {run['training']['steps']} is kept"
                kept = "no step is kept yet" if step is None else kept
                yield f"{kind}: {name} seed {run['seed']}, {kept}"


def make_record(run: Run, result: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Collect what is to be known about a finished run."""
    return {
        "version": VERSION,
        "key": run.key,
        "run": run.to_dict(),
        **result,
        "unit": run.task.unit,
        "source": run.task.source(),
        "controls": run.task.controls(),
        "hardware": describe_hardware(device),
        "commit": source_commit(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


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


def sign_folder(run: Run, folder: Path) -> None:
    """Write down whose folder it is; refuse that of a run with other settings."""
    path, source = folder / "run.json", run.task.source()
    old = json.loads(path.read_text()) if path.exists() else {}
    difference = run.difference(old)
    if old.get("source", source) != source:
        difference = f"its data was {old['source']} and is {source}"
    if difference is not None:
        message = f"{folder} holds a run with other settings ({difference}); to start anew"
        raise ValueError(f"{message}: rm -r {folder}")
    write_atomically(path, json.dumps(run.to_dict() | {"source": source}, indent=1).encode())


def _place(run: Run) -> Path:
    """Name a record after its cell; one in another precision must not replace it."""
    other = "" if run.training.precision == "32-true" else f"-{run.training.precision}"
    return Path(run.experiment) / run.preset / run.arm / f"{run.cell}-s{run.seed}{other}.json"


def _read(path: Path, run: Run) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_same = (
        isinstance(record, dict)
        and (record.get("version"), record.get("key")) == (VERSION, run.key)
        and run.difference(record.get("run", {})) is None
        and _same_source(run, record.get("source"))
    )
    return record if is_same else None


def _same_source(run: Run, recorded: str | None) -> bool:
    """Tell whether a record rests on the data that is here; where none is, nothing differs."""
    try:
        return not recorded or run.task.source() == recorded
    except ValueError:
        return True
