"""Keep the tables of a Markdown file up to date: each stands between two marks that name it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from smat.experiments.tables import find_experiment
from smat.report.experiments_data import Record, load_records, select
from smat.report.experiments_table import markdown_table

MARKED = re.compile(
    r"(?P<open><!-- table: (?P<name>[\w-]+) (?P<preset>\w+) -->\n)"
    r"(?P<old>.*?)"
    r"(?P<close><!-- end of table -->)",
    re.DOTALL,
)


def refresh(text: str, records: Iterable[Record]) -> str:
    """Write every marked table anew, from records.

    >>> refresh("No table here.", [])
    'No table here.'
    """
    records = list(records)

    def table(match: re.Match[str]) -> str:
        name, preset = match["name"], match["preset"]
        experiment = find_experiment(name)
        if preset not in experiment.presets:
            known = ", ".join(experiment.presets)
            raise ValueError(f"{name} has no preset {preset!r}; it has {known}")
        made = markdown_table(experiment, preset, select(records, name, preset))
        return f"{match['open']}{made}{match['close']}"

    return MARKED.sub(table, text)


def refresh_file(path: Path, roots: Iterable[Path]) -> int:
    """Write the marked tables of a file anew and return how many there are."""
    text = path.read_text(encoding="utf-8")
    path.write_text(refresh(text, load_records(roots)), encoding="utf-8")
    return len(MARKED.findall(text))
