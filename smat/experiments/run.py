"""A run is a frozen configuration, its hash names it; an experiment is a table of runs."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Protocol

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainSerializer,
    PositiveInt,
    SerializationInfo,
    TypeAdapter,
)
from pydantic import SkipValidation as Unchecked
from torch import nn

from smat.tasks.task import Task
from smat.training import TrainingConfig

HOMES = ("smat.tasks.", "smat.models.")  # configurations that need no module in their name
CHANGES_NOTHING = {"training": {"checkpoint_seconds", "accumulate"}}
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed"}  # by the names that users give
Seeds = Sequence[int] | None


class BuildsModel(Protocol):
    """The configuration of a model: frozen, of plain fields."""

    def build(self, task: Task) -> nn.Module:
        """Build the model for a task, with freshly drawn weights."""


_adapter_of: Callable[[type], TypeAdapter[Any]] = cache(TypeAdapter)


def _with_class(config: Any, info: SerializationInfo) -> dict[str, Any]:
    """Turn a configuration, a dataclass or a pydantic one, into plain data that names its class."""
    kind, defaults = type(config), info.exclude_defaults
    fields = _adapter_of(kind).dump_python(config, mode="json", exclude_defaults=defaults)
    is_ours = kind.__module__.startswith(HOMES)
    return {"class": kind.__name__ if is_ours else f"{kind.__module__}:{kind.__name__}", **fields}


class Run(BaseModel):
    """One training run: a cell of a table, for one seed."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    experiment: str  # the table, such as "subset-routing"
    preset: str  # how much of the paper's settings it keeps: "quick", "standard" or "paper"
    arm: str  # the row of the table, a model
    cell: str  # the column, a load
    seed: int  # of weights, training batches and held-out examples
    task: Annotated[Unchecked[Task], PlainSerializer(_with_class)]
    model: Annotated[Unchecked[BuildsModel], PlainSerializer(_with_class)]
    training: TrainingConfig
    revision: PositiveInt = 1  # raised when new code gives another result with the same settings

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that name the run's folder.

        A field at its default does not count, so a new field leaves old runs their names; a
        default, once records rest on it, must therefore never change. What is no field, such as
        the default of a layer or which parameters decay, counts through the `revision`.
        """
        plain = self.model_dump(mode="json", exclude_defaults=True, exclude=CHANGES_NOTHING)
        canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """What a person calls it."""
        return f"{self.arm} {self.cell} seed {self.seed}"

    def to_dict(self) -> dict[str, Any]:
        """Return every field as plain data."""
        return self.model_dump(mode="json")

    def difference(self, plain: Mapping[str, Any]) -> str | None:
        """Say where plain data tells of other settings than this run's, in fields that both have.

        How often a checkpoint is written changes no result, so it is no difference.
        """
        return _difference(plain, self.model_dump(mode="json", exclude=CHANGES_NOTHING))


def _difference(old: Any, new: Any, name: str = "") -> str | None:
    """Say where two plain configurations differ: 'steps was 10 and is 20'."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        common = (key for key in old if key in new)
        found = (_difference(old[key], new[key], f"{name}.{key}".lstrip(".")) for key in common)
        return next(filter(None, found), None)
    return None if old == new else f"{name} was {old!r} and is {new!r}"


@dataclass(frozen=True)
class Arm:
    """A row of a table at one load: what the report calls it, and what is trained on what, how."""

    label: str
    task: Task
    model: BuildsModel
    training: TrainingConfig
    revision: int = 1  # that of `Run`


@dataclass(frozen=True)
class Preset:
    """How much of the paper's settings a table keeps."""

    reduced: str  # what is reduced, in one line
    cells: Mapping[str, Mapping[str, Arm]]  # rows, column by column; {seed} in a name is filled in
    seeds: tuple[int, ...] = (0,)
    arms: tuple[str, ...] = ()  # those that are run; none named: all


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper that can be run."""

    name: str  # what the command line calls it, such as "subset-routing"
    title: str  # what the report calls it
    published: str | None  # labels of the paper's tables, keys of published.json
    arms: Mapping[str, str]  # rows, with their labels
    cells: Mapping[str, str]  # columns, with their labels
    presets: Mapping[str, str]  # each with one line that says what is reduced
    runs: Callable[[str, Seeds], list[Run]]  # of a preset, with given seeds or its own
    describe: str = ""  # what was chosen where the paper is silent, and why

    @classmethod
    def of_presets(cls, *, presets: Mapping[str, Preset], **fields: Any) -> Experiment:
        """Make an experiment whose rows are those of its last preset, the paper's own."""
        (*_, paper) = presets.values()
        (rows, *_) = paper.cells.values()
        arms = {arm: rows[arm].label for arm in paper.arms or rows}
        lines = {name: preset.reduced for name, preset in presets.items()}

        def runs(name: str, seeds: Seeds) -> list[Run]:
            preset = presets[name]
            return [
                Run(
                    experiment=fields["name"], preset=name, arm=arm, cell=cell.format(seed=seed),
                    seed=seed, task=rows[arm].task, model=rows[arm].model,
                    training=rows[arm].training, revision=rows[arm].revision,
                )
                for seed in (preset.seeds if seeds is None else seeds)
                for arm in preset.arms or arms
                for cell, rows in preset.cells.items()
            ]  # fmt: skip

        return cls(arms=arms, presets=lines, runs=runs, **fields)

    def with_training(self, **changes: Any) -> Experiment:
        """Return the experiment with all runs trained otherwise, as precision="bf16-mixed"."""

        def runs(preset: str, seeds: Seeds) -> list[Run]:
            made = self.runs(preset, seeds)
            trainings = [run.training.changed(**changes) for run in made]
            return [Run(**dict(r) | {"training": t}) for r, t in zip(made, trainings, strict=True)]

        return replace(self, runs=runs)

    def choose(self, preset: str, seeds: Seeds = None, only: Sequence[str] = ()) -> list[Run]:
        """List the runs of a preset; `only` names arms and cells, or patterns such as "smat_d*".

        Several arms (or cells) are alternatives; an arm and a cell must both fit.
        """
        if preset not in self.presets:
            known = ", ".join(self.presets)
            raise ValueError(f"{self.name} has no preset {preset!r}; known: {known}")
        runs = self.runs(preset, seeds)
        arms = list(dict.fromkeys(run.arm for run in runs))
        cells = list(dict.fromkeys(run.cell for run in runs))
        for pattern in only:
            if not fnmatch.filter([*arms, *cells], pattern):
                known = f"arms: {', '.join(arms)}; cells: {', '.join(cells)}"
                message = f"{self.name}, preset {preset}, has no arm or cell {pattern!r}"
                raise ValueError(f"{message}; {known}")
        # All arms, or cells, if no pattern is about such names.
        wanted_arms = [name for each in only for name in fnmatch.filter(arms, each)] or arms
        wanted_cells = [name for each in only for name in fnmatch.filter(cells, each)] or cells
        return [run for run in runs if run.arm in wanted_arms and run.cell in wanted_cells]
