"""Write the report: one page of HTML that needs nothing else, and the same as Markdown."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

from smat.experiments.run import Experiment
from smat.experiments.tables import EXPERIMENTS
from smat.extras import require
from smat.report import experiment_tables as tables
from smat.report import figures, records, text_tables
from smat.report.records import PaperTable, Published, Record
from smat.training.checkpoint import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment

FIGURES = "report-figures"


@dataclass(frozen=True)
class Section:
    """One experiment: its task, its tables, and what the paper has about it."""

    experiment: Experiment
    task: str
    tables: Sequence[tables.ResultTable]
    not_run: Sequence[str]
    sources: Sequence[str]
    details: Sequence[PaperTable]


@dataclass(frozen=True)
class Content:
    """All that a report says."""

    records: Sequence[Record]
    sections: Sequence[Section]
    not_reproduced: Published


def write_report(out: Path, roots: Sequence[Path]) -> Path:
    """Write report.html and report.md into a folder from the records below the roots.

    Returns the path of the page. Where two roots hold the same run, the first root's counts.
    """
    found = records.load_records(roots)
    return save_report(out, content_of(EXPERIMENTS, found, records.load_published()))


def content_of(
    experiments: Mapping[str, Experiment], found: Sequence[Record], paper: Published
) -> Content:
    """Arrange everything that is known as sections, in the order of the experiments."""
    known = [record for record in found if record.run.experiment in experiments]
    sections = [_section(experiment, known, paper) for experiment in experiments.values()]
    return Content(known, sections, records.not_reproduced(experiments, paper))


def save_report(out: Path, content: Content) -> Path:
    """Write a report's page, its Markdown and the pictures that the Markdown shows."""
    templates = _templates()
    drawn = {"masks.svg": figures.mask_figure(figures.example_masks())}
    for section in content.sections:
        for table in section.tables:
            arms = section.experiment.arms
            if figure := figures.curves_figure(table.records, arms, table.cells):
                drawn[picture_name(section.experiment, table.preset)] = figure
    pictures = {name: figures.figure_svg(figure) for name, figure in drawn.items()}
    for name, svg in pictures.items():
        write_atomically(out / FIGURES / name, svg.encode())
    for name in ("report.md", "report.html"):
        template = templates.get_template(f"{name}.jinja")
        text = template.render(content=content, pictures=pictures, folder=FIGURES)
        write_atomically(out / name, re.sub(r"\n{3,}", "\n\n", text).rstrip().encode() + b"\n")
    return out / "report.html"


def _templates() -> Environment:
    jinja2 = require("jinja2", extra="cli")
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("smat.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.globals.update(tables=tables, records=records, text_tables=text_tables)
    templates.globals.update(prose=prose, progress=progress, picture_name=picture_name)
    templates.filters["md"] = text_tables.escape_markdown
    templates.filters["base64"] = lambda svg: b64encode(svg.encode()).decode()
    return templates


def prose(text: str) -> str:
    """Write paragraphs, lists and `code` of a docstring as HTML.

    >>> prose("One `x`.")
    '<p>One <code>x</code>.</p>\\n'
    """
    return MarkdownIt("zero").enable(["list", "backticks"]).render(text)


def progress(experiment: Experiment, table: tables.ResultTable) -> str:
    """Say how many of the runs of a preset are done."""
    keys = {record.key for record in table.records}
    runs = experiment.runs(table.preset, None) if table.preset in experiment.presets else []
    done = f"{sum(run.key in keys for run in runs)} of {len(runs)}"
    return done if runs else f"{len(table.records)} runs"


def picture_name(experiment: Experiment, preset: str) -> str:
    """Name the file of a preset's learning curves."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", f"{experiment.name}-{preset}-curves") + ".svg"


def _section(experiment: Experiment, found: Sequence[Record], paper: Published) -> Section:
    """Show the presets that have records, and one that the paper's numbers stand beside."""
    presets = list(experiment.presets)
    ran = sorted({r.run.preset for r in found if r.run.experiment == experiment.name})
    shown = [tables.result_table(experiment, preset, found, paper) for preset in ran]
    compared = any(tables.PAPER in set(table.numbers["kind"]) for table in shown)
    if not compared and presets[-1] not in ran:
        shown.append(tables.result_table(experiment, presets[-1], found, paper))
    most = max(table.num_filled for table in shown)

    def rank(table: tables.ResultTable) -> tuple[bool, int]:
        # The largest settings first; but a single run at the paper's settings must not push a
        # whole table of smaller ones down the page.
        place = presets.index(table.preset) if table.preset in presets else -1
        return 2 * table.num_filled < most, -place

    shown.sort(key=rank)
    first = shown[0].preset if shown[0].preset in presets else presets[-1]
    runs = experiment.runs(first, None)
    return Section(
        experiment,
        runs[-1].task.describe() if runs else "",  # of the hardest cell
        shown,
        [preset for preset in presets if preset not in {table.preset for table in shown}],
        [table["source"] for table in records.reproduced_tables(experiment, paper)],
        records.detail_tables(experiment, paper),
    )
