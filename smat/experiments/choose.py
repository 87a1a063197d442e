"""Choose runs of an experiment by preset, seeds, arms and cells."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from smat.experiments.run import Experiment, Run


def choose_runs(
    experiment: Experiment,
    preset: str,
    seeds: Sequence[int] | None = None,
    only: Sequence[str] = (),
) -> list[Run]:
    """List the runs of a preset; `only` names arms and cells, or patterns such as "smat_d*".

    Several arms (or cells) are alternatives; an arm and a cell must both fit.
    """
    if preset not in experiment.presets:
        known = ", ".join(experiment.presets)
        raise ValueError(f"{experiment.name} has no preset {preset!r}; known: {known}")
    runs = experiment.runs(preset, seeds)
    arms, cells = dict.fromkeys(run.arm for run in runs), dict.fromkeys(run.cell for run in runs)
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in (*arms, *cells)):
            raise ValueError(
                f"{experiment.name}, preset {preset}, has no arm or cell {pattern!r}; "
                f"arms: {', '.join(arms)}; cells: {', '.join(cells)}"
            )
    wanted_arms, wanted_cells = _fitting(arms, only), _fitting(cells, only)
    return [run for run in runs if run.arm in wanted_arms and run.cell in wanted_cells]


def parse_seeds(text: str | None) -> list[int] | None:
    """Read seeds as the command line has them.

    >>> parse_seeds("0,1,2"), parse_seeds(None)
    ([0, 1, 2], None)
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"seeds are whole numbers, as 0,1,2, not {text!r}") from None


def _fitting(names: Sequence[str] | dict[str, None], only: Sequence[str]) -> set[str]:
    """Keep the names that a pattern fits; all of them if no pattern is about such names."""
    found = {name for name in names if any(fnmatchcase(name, pattern) for pattern in only)}
    return found or set(names)
