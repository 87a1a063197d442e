"""Write tables as Markdown: in a file, on a terminal, in the report, which is HTML as well."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markdown_it import MarkdownIt
from rich.console import Console
from rich.markdown import Markdown

from smat.experiments.run import Experiment
from smat.experiments.tables import EXPERIMENTS, find_experiment
from smat.extras import require
from smat.report import experiment_tables as tables
from smat.report import figures, records
from smat.report.cell_figures import cells_figure
from smat.report.costs import LABEL, Costs, load_benchmarks, load_costs
from smat.report.records import PaperTable, Published, Record
from smat.training.checkpoint import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment

FIGURES, COSTS = "report-figures", "costs"
BELOW = "\N{DOWNWARDS ARROW WITH TIP RIGHTWARDS}"
MARKED = re.compile(
    r"(<!-- table: (?P<name>[\w-]+) (?P<preset>\w+) -->\n).*?(<!-- end of table -->)",
    re.DOTALL,
)


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
    costs: Sequence[Costs] = ()
    prefill: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # records, by name


def write_report(out: Path, roots: Sequence[Path]) -> Path:
    """Write report.html and report.md into a folder from the records below the roots.

    Returns the path of the page. Where two roots hold the same run, the first root's counts.
    """
    found, paper = records.load_records(roots), records.load_published()
    content = content_of(EXPERIMENTS, found, paper)
    costs, prefill = load_costs(roots, paper), load_benchmarks(roots, "prefill")
    known = {LABEL} if costs else set()
    others = {key: table for key, table in content.not_reproduced.items() if key not in known}
    content = replace(content, costs=costs, prefill=prefill, not_reproduced=others)
    return save_report(out, content)


def content_of(
    experiments: Mapping[str, Experiment], found: Sequence[Record], paper: Published
) -> Content:
    """Arrange everything that is known as sections, in the order of the experiments."""
    known = [record for record in found if record.run.experiment in experiments]
    sections = [_section(experiment, known, paper) for experiment in experiments.values()]
    others = records.not_reproduced(experiments, paper)
    return Content(known, sections, others)


def save_report(out: Path, content: Content) -> Path:
    """Write a report's page, its Markdown and the pictures that the Markdown shows."""
    templates = _templates()
    drawn = {"masks.svg": figures.mask_figure(figures.example_masks())}
    for name, record in content.prefill.items():
        drawn[f"costs-{name}.svg"] = figures.bench_figure(record)
    for section in content.sections:
        for table in section.tables:
            arms = section.experiment.arms
            for kind, figure in (
                ("curves", figures.curves_figure(table.records, arms, table.cells)),
                ("cells", cells_figure(table, arms)),
            ):
                if figure is not None:
                    drawn[picture_name(section.experiment, table.preset, kind)] = figure
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
    templates.globals.update(tables=tables, records=records, format_markdown=format_markdown)
    templates.globals.update(format_costs=format_costs)
    templates.globals.update(prose=prose, progress=progress, picture_name=picture_name)
    templates.filters["md"] = escape_markdown
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
    made = {(record.run.arm, record.run.cell, record.run.seed) for record in table.records}
    runs = experiment.runs(table.preset, None) if table.preset in experiment.presets else []
    done = f"{sum((run.arm, run.cell, run.seed) in made for run in runs)} of {len(runs)}"
    return done if runs else f"{len(table.records)} runs"


def picture_name(experiment: Experiment, preset: str, kind: str) -> str:
    """Name the file of a preset's picture: "curves" of learning, or "cells" of its table."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", f"{experiment.name}-{preset}-{kind}") + ".svg"


def _section(experiment: Experiment, found: Sequence[Record], paper: Published) -> Section:
    """Show the presets that have records; the paper's numbers beside them, or else alone."""
    presets = list(experiment.presets)
    ran = sorted({r.run.preset for r in found if r.run.experiment == experiment.name})
    shown = [tables.result_table(experiment, preset, found, paper) for preset in ran]
    compared = any(tables.PAPER in set(table.numbers["kind"]) for table in shown)
    reproduced = records.reproduced_tables(experiment, paper)
    most = max((table.num_filled for table in shown), default=0)

    def rank(table: tables.ResultTable) -> tuple[bool, int]:
        # The largest settings first; but a single run at the paper's settings must not push a
        # whole table of smaller ones down the page.
        place = presets.index(table.preset) if table.preset in presets else -1
        return 2 * table.num_filled < most, -place

    shown.sort(key=rank)
    first = next((table.preset for table in shown if table.preset in presets), presets[-1])
    runs = experiment.runs(first, None)
    return Section(
        experiment,
        runs[-1].task.describe() if runs else "",  # of the hardest cell
        shown,
        [preset for preset in presets if preset not in {table.preset for table in shown}],
        [table["source"] for table in reproduced],
        [*([] if compared else reproduced), *records.detail_tables(experiment, paper)],
    )


def not_started(name: str, preset: str) -> str:
    """Say in one line that nobody has begun, and how to."""
    return f"Not started: `smat run {name} --preset {preset}` begins it."


def format_markdown(table: tables.Table) -> str:
    """Write a table as Markdown: ours in bold, what belongs to an arm below it."""
    lines = [["", *map(escape_markdown, table.headings.values())]]
    lines.append(["---", *["---:"] * len(table.headings)])
    for (arm, kind, label), texts in table.text.iterrows():
        label = escape_markdown(label)
        label = f"**{label}**" if kind == tables.OURS else f"{BELOW} {label}" if arm else label
        lines.append([label, *map(escape_markdown, texts)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def format_costs(costs: Costs, width: int | None = None) -> str:
    """Write costs as Markdown, in tables of at most so many characters, the facts below."""
    parts = tables.split_columns(costs, width) if width else [costs]
    facts = (f"- {name}: {escape_markdown(text)}\n" for name, text in costs.facts.items())
    return "\n".join([*map(format_markdown, parts), "".join(facts)])


def escape_markdown(text: str) -> str:
    r"""Write a text so that Markdown shows it as it is.

    >>> print(escape_markdown("a|b *c* <d>"))
    a\|b \*c\* &lt;d&gt;
    """
    text = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def refresh(text: str, found: Sequence[Record], costs: Sequence[Costs] = ()) -> str:
    """Write every marked table of a Markdown text anew, from records; "costs NAME" marks costs.

    >>> refresh("No table here.", [])
    'No table here.'
    """
    published = records.load_published()

    def table(match: re.Match[str]) -> str:
        name, preset = match["name"], match["preset"]
        if name == COSTS:
            known = {each.name: format_costs(each) for each in costs}
            begin = f"Not measured: `smat bench models --preset {preset}` does.\n"
            return f"{match[1]}{known.get(preset, begin)}{match[4]}"
        experiment = find_experiment(name)
        if preset not in experiment.presets:
            presets = ", ".join(experiment.presets)
            raise ValueError(f"{name} has no preset {preset!r}; it has {presets}")
        result = tables.result_table(experiment, preset, found, published)
        made = format_markdown(result) if result.records else f"{not_started(name, preset)}\n"
        if result.own_cells:  # other lengths than the paper's: its table stands below
            for paper in records.reproduced_tables(experiment, published):
                caption = escape_markdown(paper["caption"])
                made += f"\nThe paper: {caption}.\n\n{format_markdown(tables.paper_table(paper))}"
        reduced = escape_markdown(experiment.presets[preset])
        return f"{match[1]}Preset {preset}: {reduced}.\n\n{made}{match[4]}"

    return MARKED.sub(table, text)


def refresh_file(path: Path, roots: Iterable[Path]) -> int:
    """Write the marked tables of a file anew and return how many there are."""
    text = path.read_text(encoding="utf-8")
    roots = list(roots)
    costs = load_costs(roots, records.load_published())
    path.write_text(refresh(text, records.load_records(roots), costs), encoding="utf-8")
    return len(MARKED.findall(text))


def print_table(
    experiment: Experiment, preset: str, roots: Sequence[str | Path], console: Console
) -> None:
    """Print the table of one preset, and what it took, on a terminal."""
    table = tables.result_table(
        experiment, preset, records.load_records(roots), records.load_published()
    )
    if not table.records and not table.left_out:
        console.print(Markdown(not_started(experiment.name, preset)))
        return
    title = f"{experiment.title}, preset {preset}: {experiment.presets.get(preset, '')}"
    title += f", in {table.unit}" if table.unit != records.PER_CENT else ""
    facts = [f"{name}: {text}" for name, text in records.facts_of(table.records).items()]
    notes = filter(None, [*facts, table.left_out])
    told = "".join(f"- {escape_markdown(note)}\n" for note in notes)
    shown = "\n".join(map(format_markdown, tables.split_columns(table, console.width)))
    console.print(Markdown(f"**{escape_markdown(title)}**\n\n{shown}\n{told}"))
