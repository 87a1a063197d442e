"""A run is a frozen configuration, its hash names it; an experiment is a table of runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smat.experiments.plain import chosen, from_plain, settings, to_plain
from smat.tasks.task import Task
from smat.training import TrainingConfig


@dataclass(frozen=True)
class Run:
    """One training run: a cell of a table, for one seed.

    Attributes:
        experiment: The table, such as "subset-routing".
        preset: How much of the paper's settings it keeps: "quick", "standard" or "paper".
        arm: The row of the table, a model.
        cell: The column, a load.
        seed: Seeds weights, training batches and held-out examples.
        task: What is trained on; its fields are its configuration.
        model: What is trained: `smat.models.ModelConfig`, or a dataclass with `build(task)`.
        training: How.
    """

    experiment: str
    preset: str
    arm: str
    cell: str
    seed: int
    task: Task
    model: Any
    training: TrainingConfig

    @cached_property
    def key(self) -> str:
        """Twelve hexadecimal digits that name the run's folder.

        A field at its default does not count, so a new field leaves old runs their names; a
        default, once records rest on it, must therefore never change.
        """
        canonical = json.dumps(to_plain(self, chosen), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.arm} {self.cell} seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain data."""
        return to_plain(self)

    def settings(self) -> dict[str, Any]:
        """Return, as plain data, the fields that change what comes out."""
        return to_plain(self, settings)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Run:
        """Rebuild a run; an unknown field raises with its name and the known ones."""
        return from_plain(cls, plain)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper that can be run.

    Attributes:
        name: What the command line calls it, such as "subset-routing".
        title: What the report calls it.
        published: The label of the paper's table, a key of published.json; None if it has none.
        arms: Rows, with their labels.
        cells: Columns, with their labels.
        presets: Each with one line that says what is reduced.
        runs: Makes the runs of a preset, with given seeds or its own.
        describe: What was chosen where the paper is silent, and why.
    """

    name: str
    title: str
    published: str | None
    arms: Mapping[str, str]
    cells: Mapping[str, str]
    presets: Mapping[str, str]
    runs: Callable[[str, Sequence[int] | None], list[Run]]
    describe: str = ""
