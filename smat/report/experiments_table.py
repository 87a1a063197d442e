"""Set results out beside the paper's: as Markdown and in a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from smat.experiments.run import Experiment
from smat.report.experiments_data import Record, load_records, stale
from smat.report.experiments_facts import (
    facts_of,
    minutes_a_run,
    parameters_of,
    seeds_of,
)
from smat.report.experiments_published import Published, load_published
from smat.report.experiments_results import OURS, PAPER, Group, ResultTable, Row, result_table
from smat.report.experiments_value import decimals_of, format_value

NOT_RUN = "not run"
NOTHING = "\N{EN DASH}"  # neither run nor to be run: the paper has no number here
BELOW = "\N{DOWNWARDS ARROW WITH TIP RIGHTWARDS}"
EXTRA = {"seeds": "seeds", "parameters": "parameters", "minutes": "min a run"}


def markdown_table(
    experiment: Experiment,
    preset: str,
    records: Iterable[Record],
    published: Published | None = None,
) -> str:
    """Write the table of one preset as Markdown, the paper's numbers below ours."""
    published = load_published() if published is None else published
    return format_markdown(result_table(experiment, preset, records, published))


def format_markdown(table: ResultTable, extra: bool = True) -> str:
    """Write a table as Markdown; `extra` adds seeds, parameters and minutes."""
    headings = ["", *table.columns.values(), *(EXTRA.values() if extra else ())]
    lines = [_line(map(escape_markdown, headings)), _line(["---"] + ["---:"] * (len(headings) - 1))]
    for group, row in rows_of(table):
        label = escape_markdown(row.label)
        label = f"**{label}**" if row.kind == OURS else f"{BELOW} {label}" if group else label
        cells = [text_of(row, cell, group) for cell in table.columns]
        tail = extras_of(group, row).values() if extra else ()
        lines.append(_line([label, *cells, *tail]))
    return "\n".join(lines) + "\n"


def rows_of(table: ResultTable) -> list[tuple[Group | None, Row]]:
    """List the rows of a table from top to bottom, with the arm that each belongs to."""
    arms = [(group, row) for group in table.groups for row in group.rows]
    return [*arms, *((None, row) for row in table.controls)]


def text_of(row: Row, cell: str, group: Group | None = None) -> str:
    """Write one cell: a number, "not run", or a dash where there is nothing to compare."""
    value = row.values.get(cell)
    if value is None:
        return NOT_RUN if row.kind == OURS else NOTHING
    text = format_value(value, decimals_of(row.label) if row.kind not in (OURS, PAPER) else 1)
    uneven = group is not None and row.kind == OURS and len(group.seeds) > 1
    return f"{text} (n = {value.num_seeds})" if uneven else text


def extras_of(group: Group | None, row: Row) -> dict[str, str]:
    """Return what stands behind a row's numbers: seeds, parameters, minutes a run."""
    if group is None or row.kind != OURS:
        return dict.fromkeys(EXTRA, "")
    return {
        "seeds": seeds_of(group.seeds),
        "parameters": parameters_of(group.records),
        "minutes": minutes_a_run(group.records),
    }


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def escape_markdown(text: str) -> str:
    r"""Write a text so that Markdown shows it as it is.

    >>> print(escape_markdown("a|b *c* <d>"))
    a\|b \*c\* &lt;d&gt;
    """
    text = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def print_table(
    experiment: Experiment, preset: str, roots: Sequence[str | Path], console: Console
) -> None:
    """Print the table of one preset, and what it took, on a terminal."""
    records = load_records(roots)
    table = result_table(experiment, preset, records, load_published())
    console.print(terminal_table(experiment, preset, table))
    for name, text in facts_of(table.records).items():
        console.print(f"[dim]{name:>9}[/]  {escape(text)}", highlight=False)
    note = stale_note(table, experiment, preset)
    if note:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)


def terminal_table(experiment: Experiment, preset: str, table: ResultTable) -> Table:
    """Set a table out for a terminal: ours bright, the paper's and the controls dim."""
    line = preset_line(experiment, preset)
    title = f"{experiment.title}, preset {preset}" + (f": {line}" if line else "")
    shown = Table(title=escape(title), title_justify="left", header_style="bold")
    shown.add_column("", no_wrap=True)
    for heading in [*table.columns.values(), *EXTRA.values()]:
        shown.add_column(escape(heading), justify="right", no_wrap=True)
    last: Group | None = None
    for number, (group, row) in enumerate(rows_of(table)):
        if number and group is not last:
            shown.add_section()
        last = group
        label = row.label if row.kind == OURS or group is None else f"  {row.label}"
        cells = [text_of(row, cell, group) for cell in table.columns]
        texts = [escape(text) for text in (label, *cells, *extras_of(group, row).values())]
        shown.add_row(*texts, style="" if row.kind == OURS else "dim")
    return shown


def preset_line(experiment: Experiment, preset: str) -> str:
    """Return the line that says how a preset is reduced; nothing for a preset of the past."""
    presets: Mapping[str, str] = experiment.presets
    return presets.get(preset, "")


def stale_note(table: ResultTable, experiment: Experiment, preset: str) -> str:
    """Say how many records were made with settings that the preset no longer has."""
    old = len(stale(table.records, experiment, preset))
    if not old:
        return ""
    return (
        f"{old} of the {len(table.records)} runs were made with other settings than the preset "
        f"{preset} has now."
    )
