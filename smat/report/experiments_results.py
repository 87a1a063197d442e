"""Arrange records as the paper's tables: an arm a group of rows, ours beside what was published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

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
    """A table of the paper as far as it has been run with one preset.

    `own_cells` tells that the runs were evaluated elsewhere than the paper's table, at shorter
    lengths for example, so that no number of the paper stands beside them.
    """

    columns: Mapping[str, str]
    groups: Sequence[Group]
    controls: Sequence[Row]
    records: Sequence[Record]
    own_cells: bool = False

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
    own_cells = own_columns(records, experiment.cells)
    columns = own_cells or dict(experiment.cells)
    for record in records:
        columns.update({cell: cell for cell in cells_of(record, columns) if cell not in columns})
    paper = {} if own_cells else paper_values(experiment, published)
    arms = dict(experiment.arms)
    arms.update({arm: arm for arm in map(arm_of, records) if arm not in arms})
    shared, own = _controls(records, columns)
    groups = []
    for arm, label in arms.items():
        same = [record for record in records if arm_of(record) == arm]
        rows = [Row(OURS, label, _values(same, columns))]
        if arm in paper:
            rows.append(Row(PAPER, "paper", paper[arm]))
        rows += [Row(CONTROL, name, by_arm[arm]) for name, by_arm in own.items() if arm in by_arm]
        groups.append(Group(label, rows, same))
    groups += _paper_only(experiment, paper, published)
    return ResultTable(columns, groups, shared, records, bool(own_cells))


def own_columns(records: Iterable[Record], cells: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of runs that fill several cells, if these are not the table's.

    >>> run = {"run": {"cell": "all"}, "by_cell": {"T=256": 90.0, "T=1024": 50.0}}
    >>> own_columns([run], {"T=1024": "T = 1024"})
    {'T=256': 'T = 256', 'T=1024': 'T = 1024'}

    A model trained at a quarter of the length means something else by T = 1024 than the paper.
    """
    found: dict[str, str] = {}
    for record in records:
        cell = record["run"]["cell"]
        if cell not in cells:
            filled = [name for name in record.get("by_cell", {}) if name not in ("", cell)]
            found.update({name: cells.get(name, name.replace("=", " = ")) for name in filled})
    return {} if all(name in cells for name in found) else found


def arm_of(record: Record) -> str:
    """Return the arm of a record's run."""
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
            by_cell = found.setdefault(name, {}).setdefault(arm_of(record), {})
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
