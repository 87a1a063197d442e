"""What the report says, before it is HTML or Markdown: a section an experiment, tables in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any

from smat.experiments.run import Experiment
from smat.report.experiments_data import Record, select
from smat.report.experiments_facts import facts_of
from smat.report.experiments_loads import load_table
from smat.report.experiments_published import (
    Published,
    detail_tables,
    not_reproduced,
    published_keys,
)
from smat.report.experiments_results import PAPER, ResultTable, result_table
from smat.report.experiments_table import preset_line, stale_note

TITLE = "SMat-Attention: experiments beside the paper"
LEAD = (
    "Every number in bold was measured by this library. Below it stands the paper's. "
    "Both are means over seeds, ± the sample standard deviation, rounded to one decimal; accuracy "
    "is in per cent. What has not been run says so."
)
MASKS = (
    "Who sees whom: a row is a query, a column a key. Every query sees its recent past, and of the "
    "distant past the keys whose point lies on its own hyperplane. At this length the proof that "
    "the VC dimension is d reaches up to d = 3."
)
NOT_REPRODUCED = (
    "The paper's other numbers, as published. They need hardware, data or time that the presets "
    "here do not ask for."
)
OWN_CELLS = "The reduced runs have other cells than the paper's table: no number is comparable."


@dataclass(frozen=True)
class PresetTable:
    """The table of one preset; `about` says what it reduces, and where the paper has the table."""

    preset: str
    about: str
    table: ResultTable
    loads: ResultTable | None
    facts: Mapping[str, str]
    progress: str
    note: str


@dataclass(frozen=True)
class Section:
    """One experiment."""

    experiment: Experiment
    task: str
    choices: str
    tables: Sequence[PresetTable]
    not_run: Sequence[str]  # presets without a single run
    details: Sequence[Mapping[str, Any]]  # what else the paper says about these runs


@dataclass(frozen=True)
class Content:
    """All that a report says."""

    records: Sequence[Record]
    sections: Sequence[Section]
    not_reproduced: Published


def content_of(
    experiments: Mapping[str, Experiment], records: Sequence[Record], published: Published
) -> Content:
    """Arrange everything that is known as sections, in the order of the experiments."""
    known = [record for record in records if record["run"]["experiment"] in experiments]
    sections = [_section(experiment, known, published) for experiment in experiments.values()]
    return Content(known, sections, not_reproduced(experiments, published))


def _section(experiment: Experiment, records: Sequence[Record], published: Published) -> Section:
    shown = presets_of(experiment, records)
    tables = [_preset_table(experiment, preset, records, published) for preset in shown]
    if not any(_has_paper(table.table) for table in tables):  # what is to be compared with
        fullest = list(experiment.presets)[-1]
        tables += [_preset_table(experiment, fullest, records, published)] * (fullest not in shown)
    tables = fullest_first(tables, list(experiment.presets))
    shown = [table.preset for table in tables]
    return Section(
        experiment,
        describe_task(experiment, shown[0]),
        cleandoc(experiment.describe),
        tables,
        [preset for preset in experiment.presets if preset not in shown],
        detail_tables(experiment, published),
    )


def _has_paper(table: ResultTable) -> bool:
    return any(row.kind == PAPER for group in table.groups for row in group.rows)


def presets_of(experiment: Experiment, records: Iterable[Record]) -> list[str]:
    """List the presets that have records, those that the experiment no longer has last."""
    found = {record["run"]["preset"] for record in select(records, experiment.name)}
    known = [preset for preset in experiment.presets if preset in found]
    return [*known, *sorted(found.difference(known))]


def fullest_first(tables: Sequence[PresetTable], order: Sequence[str]) -> list[PresetTable]:
    """Put the largest settings first, and tables with few of their cells run last.

    A single run at the paper's settings must not push a whole table of smaller ones down the page.
    """
    most = max(table.table.num_filled for table in tables)

    def rank(table: PresetTable) -> tuple[bool, int]:
        place = order.index(table.preset) if table.preset in order else -1
        return 2 * table.table.num_filled < most, -place

    return sorted(tables, key=rank)


def _preset_table(
    experiment: Experiment, preset: str, records: Sequence[Record], published: Published
) -> PresetTable:
    table = result_table(experiment, preset, records, published)
    return PresetTable(
        preset,
        _about(experiment, preset, published),
        table,
        load_table(experiment, preset, records),
        facts_of(table.records),
        progress_of(experiment, preset, table),
        " ".join(
            filter(None, [OWN_CELLS * table.own_cells, stale_note(table, experiment, preset)])
        ),
    )


def _about(experiment: Experiment, preset: str, published: Published) -> str:
    """Say what a preset reduces, and where the paper has the table."""
    sources = [published[key]["source"] for key in published_keys(experiment) if key in published]
    sentences = [preset_line(experiment, preset).rstrip(". ")]
    sentences += [f"The paper: {'; '.join(sources)}"] if sources else []
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in sentences if text)


def progress_of(experiment: Experiment, preset: str, table: ResultTable) -> str:
    """Say how many of a preset's runs are done."""
    if preset not in experiment.presets:
        return f"{len(table.records)} runs"
    keys = {record.get("key") for record in table.records}
    runs = experiment.runs(preset, None)
    return f"{sum(run.key in keys for run in runs)} of {len(runs)}"


def describe_task(experiment: Experiment, preset: str) -> str:
    """Return the task's description of itself, for the hardest cell of a preset."""
    preset = preset if preset in experiment.presets else list(experiment.presets)[-1]
    runs = experiment.runs(preset, None)
    return runs[-1].task.describe() if runs else ""
