"""Draw a table as lines over its columns, ours beside the paper's: routing patterns, lengths."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from smat.report.experiment_tables import OURS, PAPER, ResultTable, cells_of
from smat.report.figures import (
    ACCURACY_AXIS,
    draw_band,
    line_looks,
    new_figure,
    quiet_axes,
    with_style,
)
from smat.report.records import PER_CENT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIN_POINTS = 3  # a line through fewer says no more than the table


def cells_figure(table: ResultTable, arms: Mapping[str, str]) -> Figure | None:
    """Draw a line an arm, a band its seeds, dashes the paper; a panel a kind of column.

    Columns of one kind have one name: those of "T=1024" and "T=2048" are lengths, k=1 and k=2
    numbers of keys. None where no kind has three columns, or no arm three of them.
    """
    kinds = {
        kind: list(cells) for kind, cells in groupby(table.cells, lambda cell: cell.split("=")[0])
    }
    panels = [cells for cells in kinds.values() if len(cells) >= MIN_POINTS]
    filled = table.numbers[table.numbers["kind"] == OURS].groupby("arm").size()
    ran = [arm for arm in arms if filled.get(arm, 0) >= MIN_POINTS]
    if not panels or not ran:
        return None
    with with_style():
        figure = new_figure(3.6 * len(panels) + 2.6, 3.6)
        for axes, cells in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            _draw_panel(axes, table, cells, {arm: arms[arm] for arm in ran})
        handles, labels = axes.get_legend_handles_labels()
        for text in figure.legend(handles, labels, loc="outside right upper").get_texts():
            text.set_parse_math(False)  # a label is no formula
    return figure


def _draw_panel(axes: Axes, table: ResultTable, cells: list[str], arms: Mapping[str, str]) -> None:
    numbers = table.numbers.set_index(["arm", "kind", "cell"])["mean"]
    for arm, look in line_looks(arms).items():
        found = [
            [value for record in table.records if record.run.arm == arm
             for name, value in cells_of(record, table.cells).items() if name == cell]
            for cell in cells
        ]  # fmt: skip
        at = [place for place, values in enumerate(found) if values]
        mean = [numbers[arm, OURS, cells[place]] for place in at]
        axes.plot(at, mean, marker="o", **look)
        draw_band(axes, at, [min(found[x]) for x in at], [max(found[x]) for x in at], look["color"])
        paper = {x: numbers.get((arm, PAPER, cell)) for x, cell in enumerate(cells)}
        known = {x: value for x, value in paper.items() if value is not None}
        axes.plot(list(known), list(known.values()), "x:", color=look["color"], linewidth=0.9)
    axes.set_xticks(range(len(cells)), [table.cells[cell] for cell in cells])
    axes.set(**ACCURACY_AXIS if table.unit == PER_CENT else {"ylabel": table.unit})
    quiet_axes(axes)
