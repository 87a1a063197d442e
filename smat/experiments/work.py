"""Find runs that were begun and are not finished."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from smat.experiments.execute import BusyError, claim
from smat.experiments.records import Store
from smat.training.checkpoint import CURRENT, PREVIOUS


@dataclass(frozen=True)
class Work:
    """A run that was begun.

    Attributes:
        run: Its settings, as plain data.
        is_running: A process is at work on it now.
        saved: When its last checkpoint was written, in seconds since 1970; None if it has none.
    """

    run: dict[str, Any]
    is_running: bool
    saved: float | None

    @property
    def experiment(self) -> str:
        """The experiment that it belongs to."""
        return self.run["experiment"]

    def describe(self) -> str:
        """Say in one line what it is and how far.

        >>> run = {"experiment": "mqar", "preset": "quick", "arm": "mamba2", "cell": "k=1"}
        >>> Work(run | {"seed": 0}, is_running=False, saved=None).describe()
        'interrupted: mqar quick mamba2 k=1 seed 0 (no checkpoint yet)'
        """
        name = " ".join(str(self.run[part]) for part in ("experiment", "preset", "arm", "cell"))
        when = "no checkpoint yet"
        if self.saved is not None:
            moment = datetime.fromtimestamp(self.saved, timezone.utc)
            when = f"last checkpoint {moment:%Y-%m-%d %H:%M:%S} UTC"
        kind = "running" if self.is_running else "interrupted"
        return f"{kind}: {name} seed {self.run['seed']} ({when})"


def work_in_progress(store: Store) -> Iterator[Work]:
    """Yield what is at work or was interrupted, below a root."""
    for path in sorted((store.root / "runs").glob("*/*/run.json")):
        folder = path.parent
        times = [file.stat().st_mtime for file in _checkpoints(folder)]
        running = _is_claimed(folder)
        if running or times:
            yield Work(json.loads(path.read_text()), running, max(times, default=None))


def _checkpoints(folder: Path) -> list[Path]:
    return [folder / name for name in (CURRENT, PREVIOUS) if (folder / name).exists()]


def _is_claimed(folder: Path) -> bool:
    try:
        with claim(folder):
            return False
    except BusyError:
        return True
