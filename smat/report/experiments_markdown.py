"""Write the report as Markdown, with the same numbers as the page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from smat.report.experiments_content import (
    LEAD,
    MASKS,
    NOT_REPRODUCED,
    TITLE,
    Content,
    PresetTable,
    Section,
)
from smat.report.experiments_facts import facts_of
from smat.report.experiments_table import escape_markdown, format_markdown
from smat.report.published_table import heading_of, notes_of, published_markdown


def markdown_page(content: Content, pictures: Mapping[str, str]) -> str:
    """Write the whole report; `pictures` says where each picture lies, by its name."""
    parts = [f"# {TITLE}", LEAD, _facts(facts_of(content.records))]
    parts += [part for section in content.sections for part in _section(section, pictures)]
    parts += ["## The masks", MASKS, _picture("Masks for d = 1..4 and the stepped window",
                                              pictures.get("masks.svg"))]  # fmt: skip
    if content.not_reproduced:
        parts += ["## Not reproduced here", NOT_REPRODUCED]
        parts += [part for table in content.not_reproduced.values() for part in _published(table)]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def figure_name(section: Section, table: PresetTable) -> str:
    """Return the file name of a table's learning curves."""
    name = f"{section.experiment.name}-{table.preset}-curves"
    return re.sub(r"[^A-Za-z0-9_-]+", "_", name) + ".svg"


def _section(section: Section, pictures: Mapping[str, str]) -> list[str]:
    experiment = section.experiment
    parts = [f"## {escape_markdown(experiment.title)}", section.task]
    for table in section.tables:
        parts.append(f"### Preset {escape_markdown(table.preset)}")
        parts.append(escape_markdown(table.about))
        parts.append(format_markdown(table.table, extra=bool(table.table.records)))
        parts += [escape_markdown(table.note), _facts(table.facts)]
        if table.loads:
            parts += ["Accuracy by load:", format_markdown(table.loads, extra=False)]
        title = f"Learning curves, {experiment.title}, preset {table.preset}"
        parts.append(_picture(title, pictures.get(figure_name(section, table))))
    if section.not_run:
        names = ", ".join(f"`{preset}`" for preset in section.not_run)
        parts.append(f"Not run: preset {names}.")
    parts += [part for table in section.details for part in _published(table)]
    if section.choices:
        parts += ["**What was chosen where the paper is silent.**", section.choices]
    return parts


def _facts(facts: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {escape_markdown(text)}" for name, text in facts.items())


def _picture(title: str, path: str | None) -> str:
    return f"![{escape_markdown(title)}]({path})" if path else ""


def _published(table: Mapping[str, Any]) -> list[str]:
    notes = "\n".join(f"- {escape_markdown(note)}" for note in notes_of(table))
    heading = f"### {escape_markdown(heading_of(table))}"
    return [heading, escape_markdown(f"{table['caption']}."), published_markdown(table), notes]
