"""Find runs that were begun and are not finished."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smat.experiments.execute import BusyError, claim
from smat.experiments.records import Store
from smat.training.checkpoint import CURRENT, PREVIOUS, newest_step


@dataclass(frozen=True)
class Work:
    """A run that was begun.

    Attributes:
        run: Its settings, as plain data.
        is_running: A process is at work on it now.
        step: The step of its last checkpoint; None if it has none, or none that is whole.
    """

    run: dict[str, Any]
    is_running: bool
    step: int | None

    @property
    def experiment(self) -> str:
        """The experiment that it belongs to."""
        return self.run["experiment"]

    def describe(self) -> str:
        """Say in one line what it is and how far.

        >>> run = {"experiment": "mqar", "preset": "quick", "arm": "mamba2", "cell": "k=1"}
        >>> run |= {"seed": 0, "training": {"steps": 100}}
        >>> Work(run, is_running=False, step=20).describe()
        'interrupted: mqar quick mamba2 k=1 seed 0, step 20 of 100 is kept'
        """
        name = " ".join(str(self.run[part]) for part in ("experiment", "preset", "arm", "cell"))
        kind = "running" if self.is_running else "interrupted"
        kept = f"step {self.step} of {self.run['training']['steps']} is kept"
        kept = "no step is kept yet" if self.step is None else kept
        return f"{kind}: {name} seed {self.run['seed']}, {kept}"


def work_in_progress(store: Store) -> Iterator[Work]:
    """Yield what is at work or was interrupted, below a root."""
    for path in sorted((store.root / "runs").glob("*/*/run.json")):
        folder = path.parent
        running = _is_claimed(folder)
        begun = any((folder / name).exists() for name in (CURRENT, PREVIOUS))
        if running or begun:
            yield Work(json.loads(path.read_text()), running, newest_step(folder))


def _is_claimed(folder: Path) -> bool:
    try:
        with claim(folder):
            return False
    except BusyError:
        return True
