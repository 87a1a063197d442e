"""The paper's tables as data, and what they have for an experiment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from smat.experiments.run import Experiment
from smat.report.experiments_data import is_number
from smat.report.experiments_value import Value

Published = Mapping[str, Any]

# Tables of the paper that go on with another one: further arms of the same cells, further cells.
CONTINUED = {
    "tab:mkar": ("derived:mkar-means", "text:mkar-learned", "tab:mamba-smat-3seeds-pop"),
    "tab:joint_recall": ("tab:mom_macro",),
    "tab:mqar-uniform": ("tab:mqar-placed",),
}
# What else the paper says about the runs of a table: seed by seed, levels, shares.
DETAILS = {
    "tab:mkar": ("tab:mkar-seeds", "text:mkar-chance", "fig:mkar-sanity"),
    "tab:mqar-uniform": ("tab:mqar-placed/routed",),
}


def load_published() -> Published:
    """Return the paper's tables, by label."""
    text = files("smat.experiments").joinpath("published.json").read_text(encoding="utf-8")
    return json.loads(text)


def published_keys(experiment: Experiment) -> list[str]:
    """Return the labels of the paper's tables that an experiment reproduces, the main one first.

    An experiment names one label or several, separated by commas; tables that only continue
    another one need no naming.
    """
    named = [label.strip() for label in (experiment.published or "").split(",") if label.strip()]
    further = [label for name in named for label in CONTINUED.get(name, ())]
    return list(dict.fromkeys([*named, *further]))


def detail_tables(experiment: Experiment, published: Published) -> list[Mapping[str, Any]]:
    """Return what else the paper says about an experiment."""
    keys = [key for label in published_keys(experiment) for key in DETAILS.get(label, ())]
    return [published[key] for key in keys if key in published]


def paper_values(experiment: Experiment, published: Published) -> dict[str, dict[str, Value]]:
    """Return what the paper has for an experiment, by arm and cell; earlier tables go first."""
    values: dict[str, dict[str, Value]] = {}
    for key in published_keys(experiment):
        for arm, by_cell in published.get(key, {}).get("values", {}).items():
            for cell, pair in by_cell.items():
                if is_number(pair[0]):
                    values.setdefault(arm, {}).setdefault(cell, Value(pair[0], pair[1]))
    return {
        arm: {cell: by_cell[cell] for cell in experiment.cells if cell in by_cell}
        for arm, by_cell in values.items()
        if any(cell in by_cell for cell in experiment.cells)
    }


def published_rows(experiment: Experiment, published: Published) -> dict[str, str]:
    """Return the labels of the paper's rows for an experiment."""
    labels: dict[str, str] = {}
    for key in published_keys(experiment):
        labels = {**published.get(key, {}).get("rows", {}), **labels}
    return labels


def not_reproduced(experiments: Mapping[str, Experiment], published: Published) -> Published:
    """Return the tables of the paper that no experiment reproduces."""
    known = {key for experiment in experiments.values() for key in published_keys(experiment)}
    known.update(key for main in known & DETAILS.keys() for key in DETAILS[main])
    return {key: table for key, table in published.items() if key not in known}
