"""Arrange records as the paper's tables: an arm a group of rows, ours beside what was published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from smat.experiments.run import Experiment
from smat.report.experiments_data import Record, select
from smat.report.experiments_published import Published, paper_values, published_rows
from smat.report.experiments_value import Value, mean_of

OURS, PAPER, CONTROL = "ours", "paper", "control"
SAME = 1e-6  # controls that differ by less differ by rounding alone


@dataclass(frozen=True)
class Row:
    """One line of numbers, by column; a column without a number has none."""

    kind: str
    label: str
    values: Mapping[str, Value]


@dataclass(frozen=True)
class Group:
    """What belongs to one arm: our row, the paper's, its own controls, and what it took."""

    label: str
    rows: Sequence[Row]
    records: Sequence[Record] = ()

    @property
    def seeds(self) -> list[int]:
        """The numbers of seeds that occur among the cells, each once."""
        ours = [row for row in self.rows if row.kind == OURS]
        return sorted({value.num_seeds for row in ours for value in row.values.values()})


@dataclass(frozen=True)
class ResultTable:
    """A table of the paper as far as it has been run with one preset."""

    columns: Mapping[str, str]
    groups: Sequence[Group]
    controls: Sequence[Row]
    records: Sequence[Record]

    @property
    def num_filled(self) -> int:
        """How many of the cells have been run."""
        return sum(len(row.values) for row in self._ours())

    @property
    def num_cells(self) -> int:
        """How many cells there are to run."""
        return len(self.columns) * len(self._ours())

    def _ours(self) -> list[Row]:
        return [row for group in self.groups for row in group.rows if row.kind == OURS]


def result_table(
    experiment: Experiment, preset: str, records: Iterable[Record], published: Published
) -> ResultTable:
    """Arrange the records of one preset as the table that the experiment reproduces."""
    records = select(records, experiment.name, preset)
    columns = dict(experiment.cells)
    for record in records:
        columns.update({cell: cell for cell in cells_of(record, columns) if cell not in columns})
    paper = paper_values(experiment, published)
    arms = dict(experiment.arms)
    arms.update({arm: arm for arm in map(_arm, records) if arm not in arms})
    shared, own = _controls(records, columns)
    groups = []
    for arm, label in arms.items():
        same = [record for record in records if _arm(record) == arm]
        rows = [Row(OURS, label, _values(same, columns))]
        if arm in paper:
            rows.append(Row(PAPER, "paper", paper[arm]))
        rows += [Row(CONTROL, name, by_arm[arm]) for name, by_arm in own.items() if arm in by_arm]
        groups.append(Group(label, rows, same))
    return ResultTable(
        columns, [*groups, *_paper_only(experiment, paper, published)], shared, records
    )


def load_table(
    experiment: Experiment, preset: str, records: Iterable[Record]
) -> ResultTable | None:
    """Arrange accuracies by load, for tasks that mix several; None if the task has one load."""
    records = select(records, experiment.name, preset)
    found = [load for record in records for load in record.get("by_cell", {})]
    loads = {load: load for load in found if load not in experiment.cells}
    if len(loads) < 2:
        return None
    groups: dict[tuple[str, str], list[Record]] = {}
    order = [*experiment.arms], [*experiment.cells]
    for record in sorted(records, key=lambda record: _position(record["run"], *order)):
        groups.setdefault((_arm(record), record["run"]["cell"]), []).append(record)
    tables = []
    for (arm, cell), same in groups.items():
        label = experiment.arms.get(arm, arm)
        if len(experiment.cells) > 1:
            label += f", {experiment.cells.get(cell, cell)}"
        by_load = {load: _by_seed(same, load) for load in loads}
        filled = {load: mean_of(by_seed) for load, by_seed in by_load.items() if by_seed}
        tables.append(Group(label, [Row(OURS, label, filled)], same))
    return ResultTable(loads, tables, _load_controls(records, loads), records)


def _by_seed(records: Iterable[Record], load: str) -> dict[int, float]:
    """Return the accuracies at one load."""
    found = [(record["run"]["seed"], record.get("by_cell", {})) for record in records]
    return {seed: by_cell[load] for seed, by_cell in found if load in by_cell}


def _position(run: Mapping[str, Any], arms: list[str], cells: list[str]) -> tuple[int, int, int]:
    arm = arms.index(run["arm"]) if run["arm"] in arms else len(arms)
    cell = cells.index(run["cell"]) if run["cell"] in cells else len(cells)
    return arm, cell, run["seed"]


def _arm(record: Record) -> str:
    return record["run"]["arm"]


def cells_of(record: Record, columns: Mapping[str, str]) -> dict[str, float]:
    """Return the cells of a table that a record fills, with their accuracies.

    >>> run = {"cell": "k=2"}
    >>> cells_of({"run": run, "accuracy": 80.0, "by_cell": {"": 80.0}}, {"k=2": "k = 2"})
    {'k=2': 80.0}

    One run may fill several: a model that is trained once and evaluated at several lengths.
    """
    filled = {cell: value for cell, value in record.get("by_cell", {}).items() if cell in columns}
    cell = record["run"]["cell"]
    return filled if filled and cell not in columns else {cell: record["accuracy"], **filled}


def _values(records: Sequence[Record], columns: Mapping[str, str]) -> dict[str, Value]:
    by_cell: dict[str, dict[int, float]] = {}
    for record in sorted(records, key=lambda record: record["run"]["seed"]):
        for cell, accuracy in cells_of(record, columns).items():
            by_cell.setdefault(cell, {})[record["run"]["seed"]] = accuracy
    return {cell: mean_of(by_cell[cell]) for cell in columns if cell in by_cell}


ByArm = dict[str, dict[str, Value]]  # arm, cell


def _controls(
    records: Sequence[Record], columns: Mapping[str, str]
) -> tuple[list[Row], dict[str, ByArm]]:
    """Return the controls that all arms share, and by name and arm those that differ."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for record in records:
        for name, value in table_controls(record).items():
            by_cell = found.setdefault(name, {}).setdefault(_arm(record), {})
            for cell in cells_of(record, columns):
                by_cell.setdefault(cell, []).append(value)
    shared: list[Row] = []
    own: dict[str, ByArm] = {}
    for name, lists in found.items():
        by_arm = {arm: {cell: Value(fmean(x)) for cell, x in c.items()} for arm, c in lists.items()}
        if _is_shared(by_arm):
            merged = {cell: value for values in by_arm.values() for cell, value in values.items()}
            shared.append(Row(CONTROL, name, {c: merged[c] for c in columns if c in merged}))
        else:
            own[name] = by_arm
    return shared, own


def _is_shared(by_arm: ByArm) -> bool:
    """Tell whether several arms have a control, and the same one in every cell."""
    seen: dict[str, float] = {}
    for values in by_arm.values():
        for cell, value in values.items():
            if abs(seen.setdefault(cell, value.mean) - value.mean) > SAME:
                return False
    return len(by_arm) > 1


def table_controls(record: Record) -> dict[str, float]:
    """Return the controls that belong to a whole cell, and not to one of its loads."""
    controls, loads = record.get("controls", {}), record.get("by_cell", {})
    ends = tuple(f", {load}" for load in loads if load)
    return {name: value for name, value in controls.items() if not name.endswith(ends)}


def _load_controls(records: Sequence[Record], loads: Iterable[str]) -> list[Row]:
    """Gather controls that are named for a load, such as "majority, T=64,N=4", by their name."""
    found: dict[str, dict[str, Value]] = {}
    for record in records:
        for name, value in record.get("controls", {}).items():
            for load in loads:
                if name.endswith(f", {load}"):
                    found.setdefault(name.removesuffix(f", {load}"), {})[load] = Value(value)
    return [Row(CONTROL, name, by_load) for name, by_load in found.items()]


def _paper_only(
    experiment: Experiment, paper: Mapping[str, Mapping[str, Value]], published: Published
) -> list[Group]:
    """Return what the paper has a row for and the experiment has no arm."""
    labels = published_rows(experiment, published)
    groups = []
    for arm, by_cell in paper.items():
        if arm not in experiment.arms:
            label = labels.get(arm, arm)
            groups.append(Group(label, [Row(PAPER, f"{label}, paper only", by_cell)]))
    return groups
