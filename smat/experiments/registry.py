"""The experiments that can be run, by the names that the command line gives them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from smat.experiments.run import Experiment

# One module a table or figure of the paper; each holds one `Experiment`.
MODULES = (
    "subset_routing",
    "multi_key_recall",
    "multi_key_controls",
    "mqar",
    "joint_recall",
    "length_generalization",
)


def _experiments() -> dict[str, Experiment]:
    found: dict[str, Experiment] = {}
    for name in MODULES:
        if find_spec(f"smat.experiments.{name}") is not None:
            module = import_module(f"smat.experiments.{name}")
            tables = (value for value in vars(module).values() if isinstance(value, Experiment))
            found |= {table.name: table for table in tables}
    return found


EXPERIMENTS: dict[str, Experiment] = _experiments()


def find_experiment(name: str, known: dict[str, Experiment] | None = None) -> Experiment:
    """Return an experiment by its name.

    >>> find_experiment("subset-rooting", {})
    Traceback (most recent call last):
    ValueError: there is no experiment 'subset-rooting'; known: none
    """
    known = EXPERIMENTS if known is None else known
    if name not in known:
        raise ValueError(f"there is no experiment {name!r}; known: {', '.join(known) or 'none'}")
    return known[name]
