"""Write tables as text: Markdown, the marked tables of a file, and a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markdown import Markdown

from smat.experiments.run import Experiment
from smat.experiments.tables import find_experiment
from smat.report.experiment_tables import OURS, Table, result_table
from smat.report.records import Record, facts_of, load_published, load_records, stale_note

BELOW = "\N{DOWNWARDS ARROW WITH TIP RIGHTWARDS}"
MARKED = re.compile(
    r"(<!-- table: (?P<name>[\w-]+) (?P<preset>\w+) -->\n).*?(<!-- end of table -->)",
    re.DOTALL,
)


def format_markdown(table: Table) -> str:
    """Write a table as Markdown: ours in bold, what belongs to an arm below it."""
    lines = [["", *map(escape_markdown, table.headings.values())]]
    lines.append(["---", *["---:"] * len(table.headings)])
    for (arm, kind, label), texts in table.text.iterrows():
        label = escape_markdown(label)
        label = f"**{label}**" if kind == OURS else f"{BELOW} {label}" if arm else label
        lines.append([label, *map(escape_markdown, texts)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def escape_markdown(text: str) -> str:
    r"""Write a text so that Markdown shows it as it is.

    >>> print(escape_markdown("a|b *c* <d>"))
    a\|b \*c\* &lt;d&gt;
    """
    text = re.sub(r"([\\`*_\[\]|])", r"\\\1", " ".join(text.split()))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def refresh(text: str, records: Sequence[Record]) -> str:
    """Write every marked table of a Markdown text anew, from records.

    >>> refresh("No table here.", [])
    'No table here.'
    """
    published = load_published()

    def table(match: re.Match[str]) -> str:
        name, preset = match["name"], match["preset"]
        experiment = find_experiment(name)
        if preset not in experiment.presets:
            presets = ", ".join(experiment.presets)
            raise ValueError(f"{name} has no preset {preset!r}; it has {presets}")
        made = format_markdown(result_table(experiment, preset, records, published))
        return f"{match[1]}{made}{match[4]}"

    return MARKED.sub(table, text)


def refresh_file(path: Path, roots: Iterable[Path]) -> int:
    """Write the marked tables of a file anew and return how many there are."""
    text = path.read_text(encoding="utf-8")
    path.write_text(refresh(text, load_records(roots)), encoding="utf-8")
    return len(MARKED.findall(text))


def print_table(
    experiment: Experiment, preset: str, roots: Sequence[str | Path], console: Console
) -> None:
    """Print the table of one preset, and what it took, on a terminal."""
    table = result_table(experiment, preset, load_records(roots), load_published())
    title = f"{experiment.title}, preset {preset}: {experiment.presets.get(preset, '')}"
    facts = [f"{name}: {text}" for name, text in facts_of(table.records).items()]
    notes = filter(None, [*facts, stale_note(table.records, experiment, preset)])
    told = "".join(f"- {escape_markdown(note)}\n" for note in notes)
    console.print(Markdown(f"**{escape_markdown(title)}**\n\n{format_markdown(table)}\n{told}"))
