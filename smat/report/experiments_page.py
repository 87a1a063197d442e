"""Write the report: one page of HTML that needs nothing else, and the same as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from smat.experiments.tables import EXPERIMENTS
from smat.report.experiments_content import (
    LEAD,
    MASKS,
    NOT_REPRODUCED,
    TITLE,
    Content,
    PresetTable,
    Section,
    content_of,
)
from smat.report.experiments_data import load_records
from smat.report.experiments_facts import (
    commits_of,
    days_of,
    format_minutes,
    machines_of,
    seeds_of,
    some_of,
)
from smat.report.experiments_figures import (
    curves_html,
    figure_files,
    highlight_style,
    masks_html,
    read_style,
)
from smat.report.experiments_html import prose, table_html
from smat.report.experiments_markdown import figure_name, markdown_page
from smat.report.experiments_published import load_published
from smat.report.published_table import heading_of, notes_of, published_html
from smat.training.checkpoint import write_atomically

FIGURES = "report-figures"


def write_report(out: Path, roots: Sequence[Path]) -> Path:
    """Write report.html and report.md into a folder from the records below the roots.

    Returns the path of the page. Where two roots hold the same run, the first root's counts.
    """
    content = content_of(EXPERIMENTS, load_records(roots), load_published())
    return save_report(out, content)


def save_report(out: Path, content: Content) -> Path:
    """Write a report's page, its Markdown and the pictures that the Markdown shows."""
    out = Path(out)
    tables = {
        figure_name(section, table): (section.experiment, table.table)
        for section in content.sections
        for table in section.tables
    }
    pictures = figure_files(tables)
    written = {f"{FIGURES}/{name}": svg for name, svg in pictures.items()}
    written["report.md"] = markdown_page(content, {n: f"{FIGURES}/{n}" for n in pictures})
    written["report.html"] = html_page(content)
    for name, text in written.items():
        write_atomically(out / name, text.encode())
    return out / "report.html"


def html_page(content: Content) -> str:
    """Write the whole page."""
    style = "\n".join([read_style("figures.css"), read_style("page.css"), highlight_style()])
    body = [_overview(content), *(_section(section) for section in content.sections)]
    body.append(
        f'<section id="masks"><h2>The masks</h2><p>{escape(MASKS)}</p>{masks_html()}</section>'
    )
    if content.not_reproduced:
        body.append(_not_reproduced(content.not_reproduced))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(TITLE)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(TITLE)}</h1><p class="lead">{escape(LEAD)}</p>{_tiles(content)}'
        f"</header>\n<main>\n{chr(10).join(body)}\n</main>\n"
        "<footer>Written by <code>smat report</code>; <code>smat run</code> fills what is not run."
        "</footer>\n</body>\n</html>\n"
    )


def _tiles(content: Content) -> str:
    records = content.records
    tables = [table.table for section in content.sections for table in section.tables]
    filled, cells = (sum(getattr(t, name) for t in tables) for name in ("num_filled", "num_cells"))
    facts = {
        "runs": str(len(records)),
        "compute": format_minutes(sum(record["minutes"] for record in records)),
        "cells filled": f"{filled} of {cells}",
    }
    wide = {
        "finished": days_of(records),
        "machine": "; ".join(machines_of(records)),
        "commit": some_of(commits_of(records)),
    }
    tiles = [f"<div><dt>{escape(n)}</dt><dd>{escape(t)}</dd></div>" for n, t in facts.items()]
    tiles += [
        f'<div class="wide"><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>'
        for name, text in wide.items()
        if text
    ]
    return f'<dl class="tiles">{"".join(tiles)}</dl>'


def _overview(content: Content) -> str:
    lines = []
    for section in content.sections:
        for number, table in enumerate(section.tables):
            name = section.experiment.name
            link = f'<a href="#{escape(name)}">{escape(section.experiment.title)}</a>'
            seeds = sorted({count for group in table.table.groups for count in group.seeds})
            part = table.table.num_filled / max(1, table.table.num_cells)
            cells = f"{table.table.num_filled} of {table.table.num_cells}"
            minutes = sum(record["minutes"] for record in table.table.records)
            lines.append(
                f'<tr><th scope="row" class="first">{"" if number else link}</th>'
                f'<td class="text">{escape(table.preset)}</td>'
                f'<td>{cells}<span class="bar"><i style="width:{100 * part:.0f}%"></i></span></td>'
                f"<td>{escape(table.progress)}</td><td>{seeds_of(seeds)}</td>"
                f"<td>{format_minutes(minutes) if minutes else ''}</td></tr>"
            )
    heads = '<th scope="col" class="first">experiment</th><th scope="col" class="text">preset</th>'
    heads += "".join(f'<th scope="col">{n}</th>' for n in ("cells", "runs", "seeds", "compute"))
    return (
        '<section id="overview"><h2>What was run</h2><div class="scroll"><table class="overview">'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
        '<p>Also here: <a href="#masks">the masks</a>, and '
        '<a href="#not-reproduced">what is not reproduced</a>.</p></section>'
    )


def _section(section: Section) -> str:
    experiment = section.experiment
    parts = [f'<section id="{escape(experiment.name)}"><h2>{escape(experiment.title)}</h2>']
    parts.append(prose(section.task))
    if section.choices:
        parts.append(
            '<details class="choices"><summary>What was chosen where the paper is silent</summary>'
            f"{prose(section.choices)}</details>"
        )
    for number, table in enumerate(section.tables):
        parts.append(_preset(section, table, first=number == 0))
    if section.details:
        tables = "".join(_published(table) for table in section.details)
        parts.append(
            f"<details><summary>What else the paper says about it</summary>{tables}</details>"
        )
    if section.not_run:
        names = ", ".join(f"<code>{escape(preset)}</code>" for preset in section.not_run)
        parts.append(f'<p class="reduced">Not run: preset {names}.</p>')
    return "\n".join([*parts, "</section>"])


def _preset(section: Section, preset: PresetTable, first: bool) -> str:
    experiment, table = section.experiment, preset.table
    facts = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(text)}</dd></div>"
        for name, text in preset.facts.items()
    )
    parts = [f"<h3>Preset {escape(preset.preset)}</h3>"]
    parts.append(f'<p class="reduced">{escape(preset.about)}</p>')
    caption = f"{experiment.title}, preset {preset.preset}"
    parts.append(table_html(table, caption, extra=bool(table.records)))
    if preset.note:
        parts.append(f'<p class="note">{escape(preset.note)}</p>')
    parts.append(f'<dl class="facts">{facts}</dl>')
    if preset.loads:
        loads = table_html(preset.loads, f"{experiment.title} by load", extra=False)
        parts.append(f"<details><summary>Accuracy by load</summary>{loads}</details>")
    curves = curves_html(experiment, table)
    if curves:
        opened = " open" if first else ""
        parts.append(f"<details{opened}><summary>Learning curves</summary>{curves}</details>")
    return "\n".join(parts)


def _not_reproduced(tables: Mapping[str, Mapping[str, Any]]) -> str:
    parts = ['<section id="not-reproduced"><h2>Not reproduced here</h2>']
    parts.append(f"<p>{escape(NOT_REPRODUCED)}</p>")
    return "\n".join([*parts, *map(_published, tables.values()), "</section>"])


def _published(table: Mapping[str, Any]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes_of(table))
    notes = f'<ul class="notes">{items}</ul>' if items else ""
    return (
        f"<h3>{escape(heading_of(table))}</h3><p>{escape(table['caption'])}.</p>"
        f"{published_html(table)}{notes}"
    )
