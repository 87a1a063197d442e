"""Set out a table of the paper on its own, every number with the digits it was published with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from smat.report.experiments_data import is_number
from smat.report.experiments_table import NOTHING, escape_markdown

ROW_UNITS = "as in the row"
FIGURE_SPACE = "\N{FIGURE SPACE}"


def published_html(table: Mapping[str, Any]) -> str:
    """Write a table of the paper as HTML."""
    heads = "".join(f'<th scope="col">{escape(x)}</th>' for x in table["columns"].values())
    lines = []
    for arm, label in table["rows"].items():
        cells = "".join(_cell(table, arm, cell) for cell in table["columns"])
        lines.append(f'<tr><th scope="row" class="first">{escape(label)}</th>{cells}</tr>')
    return (
        '<div class="scroll"><table class="results published">'
        f'<thead><tr><th scope="col" class="first"></th>{heads}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def published_markdown(table: Mapping[str, Any]) -> str:
    """Write a table of the paper as Markdown."""
    columns = table["columns"]
    lines = [["", *map(escape_markdown, columns.values())], ["---", *["---:"] * len(columns)]]
    for arm, label in table["rows"].items():
        texts = [escape_markdown(text_at(table, arm, cell)) for cell in columns]
        lines.append([escape_markdown(label), *texts])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def heading_of(table: Mapping[str, Any]) -> str:
    """Say which table it is, and in which unit.

    >>> heading_of({"source": "Table 7", "unit": "bits per byte"})
    'Table 7, bits per byte'
    """
    unit = table.get("unit", "")
    return table["source"] if unit in ("", ROW_UNITS) else f"{table['source']}, {unit}"


def notes_of(table: Mapping[str, Any]) -> list[str]:
    """List what the paper remarks on single cells."""
    notes = []
    for place, note in table.get("notes", {}).items():
        arm, _, cell = place.partition("/")
        names = [table["rows"].get(arm, arm)] + [table["columns"].get(cell, cell)] * bool(cell)
        notes.append(f"{', '.join(names)}: {note}")
    return notes


def _cell(table: Mapping[str, Any], arm: str, cell: str) -> str:
    text = escape(text_at(table, arm, cell, pad=True))
    if text == NOTHING:
        return f'<td class="nothing">{text}</td>'
    number = _pair(table, arm, cell)[0]
    if table.get("unit") != "%" or not is_number(number):
        return f'<td class="value">{text}</td>'
    share = min(max(number, 0.0), 100.0) / 100
    return f'<td class="value heat" style="--v:{share:.3f}">{text}</td>'


def text_at(table: Mapping[str, Any], arm: str, cell: str, pad: bool = False) -> str:
    """Write a cell as the paper prints it: words, or a mean and its deviation if it has one.

    >>> table = {"columns": {"x": "x"}, "rows": {"a": "A", "b": "B"}, "unit": "nats",
    ...          "values": {"a": {"x": [1.64, 0.006]}, "b": {"x": [99, None]}}}
    >>> text_at(table, "a", "x"), text_at(table, "b", "x"), text_at(table, "c", "x")
    ('1.640 ± 0.006', '99', '–')

    A fraction gets the decimals of its column, which JSON does not keep; a whole number stays one
    and can be padded so that decimals still stand under each other.
    """
    words = table.get("text", {}).get(arm, {}).get(cell)
    if words is not None:
        return NOTHING if words == "-" else words
    pair = _pair(table, arm, cell)
    if not is_number(pair[0]):
        return NOTHING
    by_row = table.get("unit") == ROW_UNITS
    near = [(arm, x) for x in table["columns"]] if by_row else [(x, cell) for x in table["rows"]]
    decimals = max(_decimals(x) for place in near for x in _pair(table, *place))
    return " ± ".join(_number(x, decimals, pad) for x in pair if x is not None)


def _pair(table: Mapping[str, Any], arm: str, cell: str) -> Sequence[Any]:
    return table["values"].get(arm, {}).get(cell) or (None, None)


def _number(number: float, decimals: int, pad: bool) -> str:
    if isinstance(number, int):
        return f"{number}{FIGURE_SPACE * (decimals + 1) if pad and decimals else ''}"
    return repr(number) if "e" in repr(number) else f"{number:.{decimals}f}"


def _decimals(number: Any) -> int:
    """Count the decimals of a number as it is written; one in powers of ten has none to count."""
    if not isinstance(number, float) or "e" in repr(number):
        return 0
    return len(repr(number).partition(".")[2])
