"""The paper's tables as data: those that an experiment reproduces, and those shown alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from smat.experiments.run import Experiment

PaperTable = Mapping[str, Any]  # one table of published.json
Published = Mapping[str, PaperTable]

NOTHING = "\N{EN DASH}"  # neither run nor to be run: the paper has no number here
ROW_UNITS = "as in the row"
# What else the paper says about the runs of a table: seed by seed, levels, fractions.
DETAILS = {
    "tab:mkar": ("tab:mkar-seeds", "text:mkar-chance", "fig:mkar-sanity"),
    "tab:mqar-uniform": ("tab:mqar-placed/routed",),
}


def load_published() -> Published:
    """Return the paper's tables, by label."""
    text = files("smat.experiments").joinpath("published.json").read_text(encoding="utf-8")
    return json.loads(text)


def published_keys(experiment: Experiment) -> list[str]:
    """Return the labels of the paper's tables that an experiment reproduces, the main one first."""
    return [label.strip() for label in (experiment.published or "").split(",") if label.strip()]


def reproduced_tables(experiment: Experiment, published: Published) -> list[PaperTable]:
    """Return the tables of the paper that an experiment reproduces."""
    return [published[key] for key in published_keys(experiment) if key in published]


def detail_tables(experiment: Experiment, published: Published) -> list[PaperTable]:
    """Return what else the paper says about an experiment."""
    keys = [key for label in published_keys(experiment) for key in DETAILS.get(label, ())]
    return [published[key] for key in keys if key in published]


def not_reproduced(experiments: Mapping[str, Experiment], published: Published) -> Published:
    """Return the tables of the paper that no experiment reproduces."""
    known = {key for experiment in experiments.values() for key in published_keys(experiment)}
    known.update(key for main in known & DETAILS.keys() for key in DETAILS[main])
    return {key: table for key, table in published.items() if key not in known}


def text_at(table: PaperTable, arm: str, cell: str) -> str:
    """Write a cell as the paper prints it: words, or a mean and its deviation if it has one.

    >>> table = {"columns": {"x": "x"}, "rows": {"a": "A", "b": "B"}, "unit": "nats",
    ...          "values": {"a": {"x": [1.64, 0.006]}, "b": {"x": [99, None]}}}
    >>> text_at(table, "a", "x"), text_at(table, "b", "x"), text_at(table, "c", "x")
    ('1.640 ± 0.006', '99', '–')

    A fraction gets the decimals of its column, which JSON does not keep; a whole number stays one.
    """
    words = table.get("text", {}).get(arm, {}).get(cell)
    if words is not None:
        return NOTHING if words == "-" else words
    values = table["values"]
    line = values.get(arm, {})
    by_row = table.get("unit") == ROW_UNITS
    near = line.values() if by_row else [each.get(cell, ()) for each in values.values()]
    decimals = max((_decimals(number) for pair in near for number in pair), default=0)
    numbers = [number for number in line.get(cell, ()) if number is not None]
    texts = [f"{x:.{decimals}f}" if _decimals(x) else repr(x) for x in numbers]
    return " ± ".join(texts) or NOTHING


def _decimals(number: float | None) -> int:
    """Count the decimals of a number as it is written; one in powers of ten has none to count."""
    if not isinstance(number, float) or "e" in repr(number):
        return 0
    return len(repr(number).partition(".")[2])
