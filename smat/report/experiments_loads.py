"""Arrange the accuracies of tasks that mix several loads: a column a load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from smat.experiments.run import Experiment
from smat.report.experiments_data import Record, select
from smat.report.experiments_results import (
    CONTROL,
    OURS,
    Group,
    ResultTable,
    Row,
    arm_of,
    own_columns,
)
from smat.report.experiments_value import Value, mean_of


def load_table(
    experiment: Experiment, preset: str, records: Iterable[Record]
) -> ResultTable | None:
    """Arrange accuracies by load, for tasks that mix several; None if the task has one load."""
    records = select(records, experiment.name, preset)
    columns = {**experiment.cells, **own_columns(records, experiment.cells)}
    found = [load for record in records for load in record.get("by_cell", {})]
    loads = {load: load for load in found if load not in columns}
    if len(loads) < 2:
        return None
    groups: dict[tuple[str, str], list[Record]] = {}
    order = [*experiment.arms], [*experiment.cells]
    for record in sorted(records, key=lambda record: _position(record["run"], *order)):
        groups.setdefault((arm_of(record), record["run"]["cell"]), []).append(record)
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


def _load_controls(records: Sequence[Record], loads: Iterable[str]) -> list[Row]:
    """Gather controls that are named for a load, such as "majority, T=64,N=4", by their name."""
    found: dict[str, dict[str, Value]] = {}
    for record in records:
        for name, value in record.get("controls", {}).items():
            for load in loads:
                if name.endswith(f", {load}"):
                    found.setdefault(name.removesuffix(f", {load}"), {})[load] = Value(value)
    return [Row(CONTROL, name, by_load) for name, by_load in found.items()]
