"""Write the report: one page of HTML that needs nothing else, and the same as Markdown."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING

from markdown_it import MarkdownIt

from smat.experiments.registry import EXPERIMENTS
from smat.experiments.run import Experiment
from smat.extras import require
from smat.report.experiment_tables import (
    ResultTable,
    Table,
    arm_labels,
    load_table,
    paper_table,
    result_table,
)
from smat.report.figures import curves_figure, example_masks, figure_svg, mask_figure
from smat.report.published import (
    PaperTable,
    Published,
    detail_tables,
    heading_of,
    load_published,
    not_reproduced,
    notes_of,
    reproduced_tables,
)
from smat.report.records import Record, facts_of, format_minutes, load_records, stale_note
from smat.report.text_tables import escape_markdown, format_markdown
from smat.training.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment

FIGURES = "report-figures"
OWN_CELLS = "The reduced runs have other cells than the paper's table: no number is comparable."


@dataclass(frozen=True)
class PresetTable:
    """The table of one preset; `about` says what it reduces, and where the paper has the table."""

    preset: str
    about: str
    table: ResultTable
    loads: Table | None
    progress: str
    note: str
    picture: str  # the file name of its learning curves


@dataclass(frozen=True)
class Section:
    """One experiment: its tables, presets without a single run, and what else the paper says."""

    experiment: Experiment
    task: str
    choices: str
    tables: Sequence[PresetTable]
    not_run: Sequence[str]
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
    return save_report(out, content_of(EXPERIMENTS, load_records(roots), load_published()))


def content_of(
    experiments: Mapping[str, Experiment], records: Sequence[Record], published: Published
) -> Content:
    """Arrange everything that is known as sections, in the order of the experiments."""
    known = [record for record in records if record.run.experiment in experiments]
    sections = [_section(experiment, known, published) for experiment in experiments.values()]
    return Content(known, sections, not_reproduced(experiments, published))


def save_report(out: Path, content: Content) -> Path:
    """Write a report's page, its Markdown and the pictures that the Markdown shows."""
    drawn = {"masks.svg": mask_figure(example_masks())}
    for section in content.sections:
        arms = arm_labels(section.experiment)
        for shown in section.tables:
            figure = curves_figure(shown.table.records, arms, shown.table.columns)
            drawn |= {shown.picture: figure} if figure else {}
    pictures = {name: figure_svg(figure) for name, figure in drawn.items()}
    written = {f"{FIGURES}/{name}": svg for name, svg in pictures.items()}
    for name in ("report.md", "report.html"):
        template = _templates().get_template(f"{name}.jinja")
        text = template.render(content=content, pictures=pictures, folder=FIGURES)
        written[name] = re.sub(r"\n{3,}", "\n\n", text)
    for name, text in written.items():
        write_atomically(Path(out) / name, text.encode())
    return Path(out) / "report.html"


def prose(text: str) -> str:
    """Write paragraphs, lists and `code` of a docstring as HTML.

    >>> print(prose("One `x`.\\n\\n- a\\n- b < c").strip())
    <p>One <code>x</code>.</p>
    <ul>
    <li>a</li>
    <li>b &lt; c</li>
    </ul>
    """
    return MarkdownIt("zero").enable(["list", "backticks"]).render(text)


def _templates() -> Environment:
    jinja2 = require("jinja2", extra="cli")
    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("smat.report"),
        autoescape=lambda name: name is not None and name.endswith(".html.jinja"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    used = (facts_of, format_minutes, heading_of, notes_of, paper_table, prose, format_markdown)
    templates.globals.update({function.__name__: function for function in used})
    templates.filters["md"] = escape_markdown
    templates.filters["base64"] = lambda svg: b64encode(svg.encode()).decode()
    return templates


def _section(experiment: Experiment, records: Sequence[Record], published: Published) -> Section:
    """Show the presets that have records, and one that the paper's numbers stand beside."""
    presets = list(experiment.presets)
    ran = sorted({r.run.preset for r in records if r.run.experiment == experiment.name})
    tables = [_preset_table(experiment, preset, records, published) for preset in ran]
    if not any(table.table.has_paper for table in tables) and presets[-1] not in ran:
        tables.append(_preset_table(experiment, presets[-1], records, published))
    most = max(table.table.num_filled for table in tables)

    def rank(table: PresetTable) -> tuple[bool, int]:
        # The largest settings first; but a single run at the paper's settings must not push a
        # whole table of smaller ones down the page.
        place = presets.index(table.preset) if table.preset in presets else -1
        return 2 * table.table.num_filled < most, -place

    tables.sort(key=rank)
    shown = [table.preset for table in tables]
    runs = experiment.runs(shown[0] if shown[0] in presets else presets[-1], None)
    return Section(
        experiment,
        runs[-1].task.describe() if runs else "",  # the hardest cell
        cleandoc(experiment.describe),
        tables,
        [preset for preset in presets if preset not in shown],
        detail_tables(experiment, published),
    )


def _preset_table(
    experiment: Experiment, preset: str, records: Sequence[Record], published: Published
) -> PresetTable:
    table = result_table(experiment, preset, records, published)
    sources = "; ".join(paper["source"] for paper in reproduced_tables(experiment, published))
    sentences = [
        experiment.presets.get(preset, "").rstrip(". "),
        f"The paper: {sources}" * bool(sources),
    ]
    keys = {record.key for record in table.records}
    runs = experiment.runs(preset, None) if preset in experiment.presets else []
    done = f"{sum(run.key in keys for run in runs)} of {len(runs)}"
    notes = [OWN_CELLS * table.own_cells, stale_note(table.records, experiment, preset)]
    return PresetTable(
        preset,
        " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text),
        table,
        load_table(experiment, preset, records),
        done if runs else f"{len(table.records)} runs",
        " ".join(filter(None, notes)),
        re.sub(r"[^A-Za-z0-9_-]+", "_", f"{experiment.name}-{preset}-curves") + ".svg",
    )
