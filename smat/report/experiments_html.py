"""The pieces of the report's page: tables, values, paragraphs, as HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from smat.report.experiments_results import OURS, Group, ResultTable, Row
from smat.report.experiments_table import EXTRA, NOT_RUN, NOTHING, extras_of, rows_of
from smat.report.experiments_value import Value, decimals_of, format_number, is_loss

ROOMY, WIDEST = 6, 9  # columns that have room on a desk, and columns that just fit


def table_html(table: ResultTable, caption: str, extra: bool = True) -> str:
    """Write a table: an arm a block of rows, the value of each cell as a quiet colour."""
    tail = dict(EXTRA) if extra else {}
    heads = [f'<th scope="col" class="cell">{escape(x)}</th>' for x in table.columns.values()]
    heads += [f'<th scope="col" class="extra">{escape(label)}</th>' for label in tail.values()]
    blocks = [_block(table, group, list(group.rows), tail) for group in table.groups]
    if table.controls:
        blocks.append(_block(table, None, list(table.controls), tail))
    kind = "results" + " spread" * _has_std(table) + " dense" * (len(table.columns) > ROOMY)
    return (
        f'<div class="{_scroll(len(table.columns))}"><table class="{kind}">'
        f"<caption>{escape(caption)}</caption>"
        f'<thead><tr><th scope="col" class="first"></th>{"".join(heads)}</tr></thead>'
        f"{''.join(blocks)}</table></div>"
    )


def _scroll(num_columns: int) -> str:
    """On a desk a table either scrolls sideways or keeps its heading in sight."""
    return "scroll fits" if num_columns <= WIDEST else "scroll"


def _has_std(table: ResultTable) -> bool:
    rows = [row for _, row in rows_of(table)]
    return any(value.std is not None for row in rows for value in row.values.values())


def _block(
    table: ResultTable, group: Group | None, rows: list[Row], tail: Mapping[str, str]
) -> str:
    lines = []
    for row in rows:
        cells = [_cell(row, cell, group) for cell in table.columns]
        extras = extras_of(group, row)
        cells += [f'<td class="extra">{escape(extras[name])}</td>' for name in tail]
        lines.append(
            f'<tr class="{row.kind}"><th scope="row" class="first">{escape(row.label)}</th>'
            f"{''.join(cells)}</tr>"
        )
    kind = "arm" if group else "controls"
    return f'<tbody class="{kind}">{"".join(lines)}</tbody>'


def _cell(row: Row, cell: str, group: Group | None) -> str:
    value = row.values.get(cell)
    if value is None:
        text, kind = (NOT_RUN, "missing") if row.kind == OURS else (NOTHING, "nothing")
        return f'<td class="{kind}">{text}</td>'
    per_cent = row.kind != "control" or not is_loss(row.label)
    decimals = 1 if row.kind != "control" else decimals_of(row.label)
    uneven = group is not None and row.kind == OURS and len(group.seeds) > 1
    heat = f' style="--v:{min(max(value.mean, 0.0), 100.0) / 100:.3f}"' if per_cent else ""
    kind = "value heat" if per_cent else "value"
    return f'<td class="{kind}"{heat}{_tooltip(value)}>{value_html(value, decimals, uneven)}</td>'


def _tooltip(value: Value) -> str:
    if not value.by_seed:
        return ""
    seeds = ", ".join(f"seed {seed}: {number:.2f}" for seed, number in value.by_seed.items())
    return f' title="{escape(seeds)}"'


def value_html(value: Value, decimals: int, show_seeds: bool = False) -> str:
    """Write a mean and its deviation in two columns, so that decimals stand under each other.

    >>> value_html(Value(98.25, 0.4), 1)
    '<span class="mean">98.3</span><span class="std"> ± 0.4</span>'
    """
    std = "" if value.std is None else f" ± {format_number(value.std, decimals)}"
    seeds = f'<span class="seeds"> (n = {value.num_seeds})</span>' if show_seeds else ""
    mean = format_number(value.mean, decimals)
    return f'<span class="mean">{mean}</span><span class="std">{std}</span>{seeds}'


def prose(text: str) -> str:
    """Write paragraphs, lists and `code` of a docstring as HTML.

    >>> print(prose("One `x`.\\n\\n- a\\n- b"))
    <p>One <code>x</code>.</p>
    <ul><li>a</li><li>b</li></ul>
    """
    blocks = [block for block in re.split(r"\n\s*\n", text.strip()) if block.strip()]
    return "\n".join(_prose_block(block) for block in blocks)


def _prose_block(block: str) -> str:
    items = re.split(r"(?:^|\n)\s*[-*] ", block)
    first, rest = items[0].strip(), items[1:]
    parts = [f"<p>{_inline(first)}</p>"] if first else []
    if rest:
        parts.append("<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in rest) + "</ul>")
    return "\n".join(parts)


def _inline(text: str) -> str:
    return re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(" ".join(text.split()), quote=False))
