"""Arrange records as the paper's tables: what is shown, as data frames, ours beside the paper's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from smat.experiments.run import Experiment
from smat.extras import require
from smat.report.published import (
    NOTHING,
    PaperTable,
    Published,
    pair_at,
    reproduced_tables,
    text_at,
)
from smat.report.records import Record, format_count, format_value, is_loss, select

if TYPE_CHECKING:
    from pandas import DataFrame, MultiIndex

pd = require("pandas", extra="cli")

OURS, PAPER, CONTROL = KINDS = ("ours", "paper", "control")
NOT_RUN = "not run"
RANGE = "\N{EN DASH}"
LINE = ["arm", "kind", "label"]  # what names a line of a table; lines that belong to no arm have ""
EXTRA = {"seeds": "seeds", "parameters": "parameters", "minutes": "min a run"}
SAME = 1e-6  # controls that differ by less differ by rounding alone


@dataclass(frozen=True)
class Table:
    """A table as it is shown, wherever it is shown.

    Attributes:
        headings: The columns, with what stands over each.
        text: What the cells say; a line is named by its arm, its kind and its label.
        percent: The same cells as numbers between 0 and 100, where they are accuracies.
        hint: What a cell says when it is pointed at: every seed.
    """

    headings: Mapping[str, str]
    text: DataFrame
    percent: DataFrame
    hint: DataFrame


@dataclass(frozen=True)
class ResultTable(Table):
    """A table of the paper as far as it has been run with one preset.

    `numbers` has one line a number: arm, kind, label, cell, mean, std, num_seeds. `own_cells` tells
    that the runs were evaluated elsewhere than the paper's table, at shorter lengths for example,
    so that no number of the paper stands beside them.
    """

    columns: Mapping[str, str]
    numbers: DataFrame
    records: Sequence[Record]
    own_cells: bool = False

    @property
    def has_paper(self) -> bool:
        """Whether numbers of the paper stand beside ours."""
        return bool((self.numbers["kind"] == PAPER).any())

    @property
    def seeds(self) -> str:
        """How many seeds the cells have, from the fewest to the most."""
        return _seeds(self.numbers)

    @property
    def num_filled(self) -> int:
        """How many of the cells have been run."""
        return int((self.numbers["kind"] == OURS).sum())

    @property
    def num_cells(self) -> int:
        """How many cells there are to run."""
        return len(self.columns) * int((self.text.index.get_level_values("kind") == OURS).sum())


class Observation(NamedTuple):
    """One number of one run, and the line and the cell it belongs to."""

    arm: str
    kind: str
    label: str
    cell: str
    seed: int
    value: float


def arm_labels(experiment: Experiment) -> dict[str, str]:
    """Return the arms of an experiment with what the tables call them."""
    return dict(experiment.arms)


def result_table(
    experiment: Experiment, preset: str, records: Iterable[Record], published: Published
) -> ResultTable:
    """Arrange the records of one preset as the table that the experiment reproduces."""
    records = select(records, experiment.name, preset)
    own_cells = own_columns(records, experiment.cells)
    columns = own_cells or dict(experiment.cells)
    arms = arm_labels(experiment)
    for record in records:
        arms.setdefault(record.run.arm, record.run.arm)
        for cell in cells_of(record, columns):
            columns.setdefault(cell, cell)
    ours, controls = [], []
    for record in records:
        arm, seed = record.run.arm, record.run.seed
        for cell, accuracy in cells_of(record, columns).items():
            ours.append(Observation(arm, OURS, arms[arm], cell, seed, accuracy))
            controls += [
                Observation(arm, CONTROL, name, cell, seed, value)
                for name, value in record.controls.items()
                if not name.endswith(tuple(f", {load}" for load in record.by_cell if load))
            ]
    paper = _paper_numbers(experiment, arms, {} if own_cells else published)
    numbers = pd.concat([_means(ours), paper, _join_shared(_means(controls))], ignore_index=True)
    text, percent, hint = _shown(columns, arms, numbers)
    headings = {**columns, **EXTRA} if records else columns
    if records:
        text = text.join(_extras(text.index, numbers, records))
    percent, hint = (
        percent.reindex(columns=list(headings)),
        hint.reindex(columns=list(headings), fill_value=""),
    )
    return ResultTable(
        headings, text, percent, hint, columns, numbers, records, own_cells=bool(own_cells)
    )


def load_table(experiment: Experiment, preset: str, records: Iterable[Record]) -> Table | None:
    """Arrange accuracies by load, for tasks that mix several; None if the task has one load."""
    records = select(records, experiment.name, preset)
    columns = {**experiment.cells, **own_columns(records, experiment.cells)}
    loads = {load: load for record in records for load in record.by_cell if load not in columns}
    if len(loads) < 2:
        return None
    arms, cells = arm_labels(experiment), dict(experiment.cells)
    found = []
    for record in records:
        arm, cell = record.run.arm, record.run.cell
        name = arms.setdefault(arm, arm)
        label = f"{name}, {cells.setdefault(cell, cell)}" if len(experiment.cells) > 1 else name
        for load in loads.keys() & record.by_cell.keys():
            value = record.by_cell[load]
            found.append(Observation(f"{arm} {cell}", OURS, label, load, record.run.seed, value))
        for name, value in record.controls.items():
            for load in loads:
                if name.endswith(f", {load}"):
                    name = name.removesuffix(f", {load}")
                    found.append(Observation("", CONTROL, name, load, record.run.seed, value))
    labels = {line.arm: line.label for line in found if line.kind == OURS}
    order = [f"{arm} {cell}" for arm in arms for cell in cells]
    lines = {place: labels[place] for place in order if place in labels}
    return Table(loads, *_shown(loads, lines, _means(found)))


def paper_table(table: PaperTable) -> Table:
    """Arrange a table of the paper alone, every number with the digits it was published with."""
    columns, arms = table["columns"], table["rows"]
    index = pd.MultiIndex.from_tuples([("", PAPER, label) for label in arms.values()], names=LINE)
    per_cent = table.get("unit") == "%"

    def frame(cells: list[list[object]]) -> DataFrame:
        return pd.DataFrame(cells, index=index, columns=list(columns))

    text = frame([[text_at(table, arm, cell) for cell in columns] for arm in arms])
    means = [
        [pair_at(table, arm, cell)[0] if per_cent else None for cell in columns] for arm in arms
    ]
    return Table(columns, text, frame(means), frame([[""] * len(columns)] * len(arms)))


def own_columns(records: Iterable[Record], cells: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of runs that fill several cells, if these are not the table's.

    A model trained at a quarter of the length means something else by T = 1024 than the paper.
    """
    found: dict[str, str] = {}
    for record in records:
        cell = record.run.cell
        if cell not in cells:
            filled = [name for name in record.by_cell if name not in ("", cell)]
            found.update({name: cells.get(name, name.replace("=", " = ")) for name in filled})
    return {} if all(name in cells for name in found) else found


def cells_of(record: Record, columns: Mapping[str, str]) -> dict[str, float]:
    """Return the cells of a table that a record fills, with their accuracies.

    One run may fill several: a model that is trained once and evaluated at several lengths.
    """
    filled = {cell: value for cell, value in record.by_cell.items() if cell in columns}
    cell = record.run.cell
    return filled if filled and cell not in columns else {cell: record.accuracy, **filled}


def _means(found: Sequence[Observation]) -> DataFrame:
    """Summarise the seeds of every line and cell."""
    frame = pd.DataFrame(found, columns=list(Observation._fields)).sort_values(
        "seed", kind="stable"
    )
    frame["seen"] = [f"seed {x.seed}: {x.value:.2f}" for x in frame.itertuples()]
    groups = frame.groupby([*LINE, "cell"], sort=False)
    return groups.agg(
        mean=("value", "mean"),
        std=("value", "std"),
        num_seeds=("value", "size"),
        hint=("seen", ", ".join),
    ).reset_index()


def _join_shared(controls: DataFrame) -> DataFrame:
    """Let the controls that several arms have, and the same in every cell, belong to no arm."""
    cells = controls.groupby(["label", "cell"])["mean"].agg(["min", "max"])
    same = (cells["max"] - cells["min"] <= SAME).groupby("label").all()
    shared = same[same & (controls.groupby("label")["arm"].nunique() > 1)].index
    controls["arm"] = controls["arm"].mask(controls["label"].isin(shared), "")
    return controls.drop_duplicates([*LINE, "cell"])


def _paper_numbers(
    experiment: Experiment, arms: Mapping[str, str], published: Published
) -> DataFrame:
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
    return frame.assign(num_seeds=0, hint="").drop_duplicates([*LINE, "cell"])


def _shown(
    columns: Mapping[str, str], arms: Mapping[str, str], numbers: DataFrame
) -> tuple[DataFrame, DataFrame, DataFrame]:
    """Set numbers out as lines and columns: the texts, the accuracies, the hints."""
    numbers = numbers.copy()
    ours = numbers[numbers["kind"] == OURS].groupby("arm")["num_seeds"]
    uneven = ours.nunique()[ours.nunique() > 1].index
    loss = [line.kind == CONTROL and is_loss(line.label) for line in numbers.itertuples()]
    numbers["percent"] = numbers["mean"].mask(loss)
    numbers["text"] = [
        format_value(line.mean, line.std if line.kind != CONTROL else None, 3 if x else 1)
        + f" (n = {line.num_seeds})" * (line.kind == OURS and line.arm in uneven)
        for line, x in zip(numbers.itertuples(), loss, strict=True)
    ]
    lines = [(arm, OURS, label) for arm, label in arms.items()]
    lines = list(dict.fromkeys([*lines, *numbers[LINE].itertuples(index=False, name=None)]))
    order = list(dict.fromkeys([*arms, *(arm for arm, _, _ in lines if arm), ""]))
    lines.sort(key=lambda line: (order.index(line[0]), KINDS.index(line[1])))
    index = pd.MultiIndex.from_tuples(lines, names=LINE)

    def wide(column: str) -> DataFrame:
        frame = numbers.pivot(index=LINE, columns="cell", values=column)
        return frame.reindex(index=index, columns=list(columns))

    text = wide("text").astype(object)
    is_ours = text.index.get_level_values("kind") == OURS
    text[is_ours] = text[is_ours].fillna(NOT_RUN)
    return text.fillna(NOTHING), wide("percent"), wide("hint").fillna("")


def _extras(lines: MultiIndex, numbers: DataFrame, records: Sequence[Record]) -> DataFrame:
    """Return what stands behind our numbers: seeds, parameters, minutes a run."""
    texts = []
    for arm, kind, _ in lines:
        same = [record for record in records if record.run.arm == arm and kind == OURS]
        counts = sorted({record.parameters for record in same if record.parameters})
        minutes = fmean(record.minutes for record in same) if same else 0.0
        digits = 2 if minutes < 1 else int(minutes < 10)
        texts.append(
            [
                _seeds(numbers[numbers["arm"] == arm]) if same else "",
                _extremes(map(format_count, counts)),
                f"{minutes:.{digits}f}" if same else "",
            ]
        )
    return pd.DataFrame(texts, index=lines, columns=list(EXTRA))


def _extremes(texts: Iterable[str]) -> str:
    """Join the first and the last of several texts."""
    texts = list(dict.fromkeys(texts))
    return RANGE.join(texts if len(texts) < 3 else [texts[0], texts[-1]])


def _seeds(numbers: DataFrame) -> str:
    counts = numbers.loc[numbers["kind"] == OURS, "num_seeds"]
    return _extremes(str(count) for count in sorted(set(counts)))
