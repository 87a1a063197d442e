"""Arrange records as the paper's tables, as data frames: ours beside what was published."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from smat.experiments.run import Experiment
from smat.extras import require
from smat.report.records import (
    NOTHING,
    PER_CENT,
    PaperTable,
    Published,
    Record,
    format_count,
    format_value,
    is_loss,
    reproduced_tables,
    select_current,
    text_at,
)
from smat.tasks.task import SAMPLING_ERROR

if TYPE_CHECKING:
    from pandas import DataFrame

pd = require("pandas", extra="cli")

OURS, PAPER, CONTROL = KINDS = ("ours", "paper", "control")
LINE = ["arm", "kind", "label"]  # what names a line of a table; a line of no arm has the arm ""
EXTRA = {"seeds": "seeds", "parameters": "parameters", "minutes": "min a run"}
NOT_RUN = "not run"
SAME = 1e-6  # controls that differ by less differ by rounding alone


@dataclass(frozen=True)
class Table:
    """What a table says, wherever it is shown: `text` has a line for each arm, kind and label."""

    headings: Mapping[str, str]
    text: DataFrame


@dataclass(frozen=True)
class ResultTable(Table):
    """A table of the paper as far as it has been run with one preset.

    `numbers` has a line a number: arm, kind, label, cell, mean, std, num_seeds. Runs that were
    evaluated elsewhere than the paper's table, at shorter lengths for example, have `own_cells`,
    and no number of the paper stands beside them.
    """

    preset: str
    cells: Mapping[str, str]  # the columns that hold results, with their headings
    numbers: DataFrame
    records: Sequence[Record]
    own_cells: bool
    left_out: str = ""  # which records are not of the preset as it is now
    unit: str = PER_CENT

    @property
    def num_filled(self) -> int:
        """How many of the cells have been run."""
        return int((self.numbers["kind"] == OURS).sum())

    @property
    def num_cells(self) -> int:
        """How many cells there are to run."""
        return len(self.cells) * list(self.text.index.get_level_values("kind")).count(OURS)


def result_table(
    experiment: Experiment, preset: str, records: Iterable[Record], published: Published
) -> ResultTable:
    """Arrange the records of one preset as the table that the experiment reproduces."""
    records, left_out = select_current(records, experiment, preset)
    own_cells = own_columns(records, experiment.cells)
    cells = own_cells or dict(experiment.cells)
    arms = dict(experiment.arms)
    ours, controls, errors = [], [], {}
    for record in records:
        arm = record.run.arm
        label = arms.setdefault(arm, arm)
        of_loads = tuple(f", {load}" for load in record.by_cell if load)
        for cell, accuracy in cells_of(record, cells).items():
            cells.setdefault(cell, cell)
            ours.append((arm, OURS, label, cell, accuracy))
            for name, value in record.controls.items():
                if name.endswith(SAMPLING_ERROR):
                    errors[name.removesuffix(SAMPLING_ERROR), cell, arm] = value
                elif not name.endswith(of_loads):
                    controls.append((arm, CONTROL, name, cell, value))
    paper = _paper_numbers(experiment, arms, {} if own_cells else published)
    known = _means(controls)
    places = zip(known["label"], known["cell"], known["arm"], strict=True)
    known["std"] = pd.Series([errors.get(place) for place in places], dtype=float)
    numbers = pd.concat([_means(ours), paper, _join_shared(known)], ignore_index=True)
    units = [each.unit for each in records]
    units += [table["unit"] for table in reproduced_tables(experiment, published)]
    unit = units[0] if units else PER_CENT
    text = _text(cells, arms, numbers, unit)
    if records:
        text = text.join(_extras(text.index, numbers, records))
    headings = {**cells, **EXTRA} if records else cells
    return ResultTable(
        headings, text, preset, cells, numbers, records, bool(own_cells), left_out, unit
    )


def load_table(experiment: Experiment, preset: str, records: Iterable[Record]) -> Table | None:
    """Arrange accuracies by load, for tasks that mix several; None if the task has one load."""
    records, _ = select_current(records, experiment, preset)
    arms, cells = dict(experiment.arms), dict(experiment.cells)
    known = {*cells, *own_columns(records, cells)}
    loads = {load: load for record in records for load in record.by_cell if load not in known}
    if len(loads) < 2:
        return None
    found = []
    for record in records:
        arm, cell = record.run.arm, record.run.cell
        label = arms.setdefault(arm, arm)
        label += f", {cells.setdefault(cell, cell)}" if len(experiment.cells) > 1 else ""
        for load in loads:
            if load in record.by_cell:
                found.append((f"{arm} {cell}", OURS, label, load, record.by_cell[load]))
            for name, value in record.controls.items():
                if name.endswith(f", {load}"):  # such as "majority, T=64,N=4"
                    found.append(("", CONTROL, name.removesuffix(f", {load}"), load, value))
    labels = {name: label for name, kind, label, *_ in found if kind == OURS}
    order = [f"{arm} {cell}" for arm in arms for cell in cells]
    lines = {name: labels[name] for name in order if name in labels}
    return Table(loads, _text(loads, lines, _means(found)))


def seed_table(experiment: Experiment, preset: str, records: Iterable[Record]) -> Table | None:
    """Set out what every seed gave, a line each; None where no arm has two."""
    records, _ = select_current(records, experiment, preset)
    cells = own_columns(records, experiment.cells) or dict(experiment.cells)
    seeds: dict[str, set[int]] = {}
    for record in records:
        seeds.setdefault(record.run.arm, set()).add(record.run.seed)
    if max(map(len, seeds.values()), default=0) < 2:
        return None
    labels = {
        f"{arm} {seed}": f"{label}, seed {seed}"
        for arm, label in experiment.arms.items()
        for seed in sorted(seeds.get(arm, ()))
    }
    found = []
    for record in records:
        name = f"{record.run.arm} {record.run.seed}"
        for cell, value in cells_of(record, cells).items():
            found.append((name, OURS, labels.get(name, name), cell, value))
    return Table(cells, _text(cells, labels, _means(found), records[0].unit))


def paper_table(table: PaperTable) -> Table:
    """Arrange a table of the paper alone, every number with the digits it was published with."""
    columns, arms = table["columns"], table["rows"]
    texts = [[text_at(table, arm, cell) for cell in columns] for arm in arms]
    index = pd.MultiIndex.from_tuples([("", PAPER, label) for label in arms.values()], names=LINE)
    return Table(columns, pd.DataFrame(texts, index=index, columns=list(columns)))


def split_columns(table: Table, width: int) -> Iterator[Table]:
    """Spread a table over several of at most so many characters, the labels in front of each."""
    of_label = max(len(label) + 3 for *_, label in table.text.index)
    blocks: list[dict[str, str]] = [{}]
    taken = of_label
    for name, heading in table.headings.items():
        needed = 2 + max(map(len, [heading, *table.text[name]]))
        if taken + needed > width and blocks[-1]:
            blocks.append({})
            taken = of_label
        blocks[-1][name] = heading
        taken += needed
    for headings in blocks:
        yield Table(headings, table.text[list(headings)])


def own_columns(records: Iterable[Record], cells: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of runs that fill several cells, if these are not the table's.

    A model trained at a quarter of the length means something else by T = 1024 than the paper.
    """
    found: dict[str, str] = {}
    for record in records:
        if record.run.cell not in cells:
            filled = [name for name in record.by_cell if name not in ("", record.run.cell)]
            found.update({name: cells.get(name, name.replace("=", " = ")) for name in filled})
    return {} if found.keys() <= cells.keys() else found


def cells_of(record: Record, columns: Mapping[str, str]) -> dict[str, float]:
    """Return the cells that a record fills: several if it was evaluated at several lengths."""
    filled = {cell: value for cell, value in record.by_cell.items() if cell in columns}
    cell = record.run.cell
    return filled if filled and cell not in columns else {cell: record.accuracy, **filled}


def _means(found: Sequence[tuple[str, str, str, str, float]]) -> DataFrame:
    """Summarise what several seeds have for one line and cell."""
    frame = pd.DataFrame(found, columns=[*LINE, "cell", "value"])
    values = frame.groupby([*LINE, "cell"], sort=False)["value"]
    means = values.agg(mean="mean", std="std", num_seeds="size").reset_index()
    # What needs no training is the same for every seed.
    return means.assign(std=means["std"].mask(means["kind"] == CONTROL))


def _join_shared(controls: DataFrame) -> DataFrame:
    """Let the controls that several arms have, and the same in every cell, belong to no arm."""
    by_cell = controls.groupby(["label", "cell"])["mean"]
    same = (by_cell.max() - by_cell.min() <= SAME).groupby("label").all()
    shared = same & (controls.groupby("label")["arm"].nunique() > 1)
    controls["arm"] = controls["arm"].mask(controls["label"].isin(shared[shared].index), "")
    return controls.drop_duplicates([*LINE, "cell"])


def _paper_numbers(experiment: Experiment, arms: Iterable[str], published: Published) -> DataFrame:
    """Return what the paper has for an experiment; where two tables have a cell, the first's."""
    tables = reproduced_tables(experiment, published)
    labels = {arm: label for table in reversed(tables) for arm, label in table["rows"].items()}
    lines = [
        (arm, PAPER, "paper" if arm in arms else f"{labels.get(arm, arm)}, paper only", cell, *pair)
        for table in tables
        for arm, by_cell in table["values"].items()
        for cell, pair in by_cell.items()
        if cell in experiment.cells and pair[0] is not None
    ]
    frame = pd.DataFrame(lines, columns=[*LINE, "cell", "mean", "std"])
    return frame.drop_duplicates([*LINE, "cell"]).astype({"std": float})


def _text(
    columns: Mapping[str, str], arms: Mapping[str, str], numbers: DataFrame, unit: str = PER_CENT
) -> DataFrame:
    """Set numbers out as lines and columns, arm after arm: ours, the paper's, its controls."""
    ours = numbers[numbers["kind"] == OURS].groupby("arm")["num_seeds"].nunique()
    uneven = set(ours[ours > 1].index)
    texts = []
    for line in numbers.itertuples():
        of_loss = unit != PER_CENT or (line.kind == CONTROL and is_loss(line.label))
        decimals = 3 if of_loss else 1
        text = format_value(line.mean, line.std, decimals)
        several = line.kind == OURS and line.arm in uneven
        texts.append(f"{text} (n = {line.num_seeds:.0f})" if several else text)
    lines = [(arm, OURS, label) for arm, label in arms.items()]
    lines = list(dict.fromkeys([*lines, *numbers[LINE].itertuples(index=False, name=None)]))
    order = list(dict.fromkeys([*arms, *numbers["arm"][numbers["arm"] != ""], ""]))
    lines.sort(key=lambda line: (order.index(line[0]), KINDS.index(line[1])))
    wide = numbers.assign(text=texts).pivot(index=LINE, columns="cell", values="text")
    index = pd.MultiIndex.from_tuples(lines, names=LINE)
    text = wide.reindex(index=index, columns=list(columns)).astype(object)
    missing = [NOT_RUN if kind == OURS else NOTHING for _, kind, _ in lines]
    return text.apply(lambda column: column.where(column.notna(), missing))


def _extras(
    lines: Iterable[tuple[str, str, str]], numbers: DataFrame, records: Sequence[Record]
) -> DataFrame:
    """Return what stands behind our numbers: seeds, parameters, minutes a run."""
    texts = []
    for arm, kind, _ in lines:
        same = [record for record in records if record.run.arm == arm and kind == OURS]
        if not same:
            texts.append(["", "", ""])
            continue
        counts = sorted({record.parameters for record in same if record.parameters})
        minutes = fmean(record.minutes for record in same)
        digits = 2 if minutes < 1 else int(minutes < 10)
        seeds, sizes = seeds_of(numbers[numbers["arm"] == arm]), map(format_count, counts)
        texts.append([seeds, _extremes(sizes), f"{minutes:.{digits}f}"])
    return pd.DataFrame(texts, index=lines, columns=list(EXTRA))


def seeds_of(numbers: DataFrame) -> str:
    """Say how many seeds our numbers have, from the fewest to the most."""
    counts = numbers.loc[numbers["kind"] == OURS, "num_seeds"]
    return _extremes(f"{count:.0f}" for count in sorted(set(counts)))


def _extremes(texts: Iterable[str]) -> str:
    texts = list(dict.fromkeys(texts))
    return NOTHING.join(texts if len(texts) < 3 else [texts[0], texts[-1]])
