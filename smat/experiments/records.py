"""Where runs live: work in progress, records of finished runs, and records of the repository."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from smat.experiments.plain import disagreement
from smat.experiments.run import Run
from smat.machine import PACKAGE, describe_hardware, source_commit
from smat.training.files import write_atomically

VERSION = 1
ROOT = Path("out/experiments")
COMMITTED = PACKAGE.parent / "results"  # only a checkout has it


@dataclass(frozen=True)
class Store:
    """The folders of runs and records.

    >>> Store(Path("out")).roots[0].as_posix()
    'out'

    Attributes:
        root: Where runs work (runs/) and leave records (records/).
        committed: Records that came with the source, read and never written.
    """

    root: Path = ROOT
    committed: Path = COMMITTED

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
        """Return the record of a finished run, own or committed; None if it is yet to be made."""
        for path in (self.path(run), self.committed / _place(run)):
            record = read_record(path)
            if record is not None and matches(record, run):
                return record
        return None

    def write(self, run: Run, record: Mapping[str, Any]) -> Path:
        """Write a record whole."""
        path = self.path(run)
        write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
        return path


def make_record(run: Run, result: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Collect what is to be known about a finished run."""
    return {
        "version": VERSION,
        "key": run.key,
        "run": run.to_dict(),
        **result,
        "controls": run.task.controls(),
        "hardware": describe_hardware(device),
        "commit": source_commit(),
        "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def matches(record: Mapping[str, Any], run: Run) -> bool:
    """Tell whether a record is of this very run, and not of one with other settings."""
    return (
        record.get("version") == VERSION
        and record.get("key") == run.key
        and disagreement(record.get("run", {}), run.settings()) is None
    )


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a record; None if there is none, or nothing that is one."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _place(run: Run) -> Path:
    return Path(run.experiment) / run.preset / run.arm / f"{run.cell}-s{run.seed}.json"
