"""Read the records of finished runs: every file that is one, first root first."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smat.experiments.run import Experiment
from smat.experiments.store import VERSION

Record = Mapping[str, Any]

NAMES = {"experiment": str, "preset": str, "arm": str, "cell": str, "seed": int}
NUMBERS = ("accuracy", "loss", "minutes")
LARGEST = 1e300  # beyond it there are only infinities, and integers that are no float


class RecordWarning(UserWarning):
    """A JSON file among the records is not a record of a run."""


def load_records(roots: Iterable[str | Path]) -> list[Record]:
    """Read the records below the roots; a run that several roots hold counts in the first.

    >>> load_records(["no/such/folder"])
    []

    A root is a folder of records, or holds one by the name `records`. A file that is not a record
    is skipped with a warning that names it.
    """
    found: dict[tuple[Any, ...], Record] = {}
    for root in map(Path, roots):
        for path in _files(root):
            try:
                record = _read(path)
            except (OSError, ValueError) as problem:
                warnings.warn(f"skipped {path}: {problem}", RecordWarning, stacklevel=2)
                continue
            found.setdefault(tuple(record["run"][name] for name in NAMES), record)
    return list(found.values())


def _files(root: Path) -> Iterator[Path]:
    records = root / "records"
    if records.is_dir():
        yield from sorted(records.rglob("*.json"))
    else:  # without `records`, what lies in `runs` is unfinished work
        files = sorted(root.rglob("*.json"))
        yield from (path for path in files if path.relative_to(root).parts[0] != "runs")


def _read(path: Path) -> Record:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_record(record)
    return record


def check_record(record: Any) -> None:
    """Raise a ValueError that says why this is not a record.

    >>> check_record({"version": 2})
    Traceback (most recent call last):
    ValueError: it is not a record of version 1 (its version is 2)
    """
    if not isinstance(record, dict):
        raise ValueError("it is not a record of a run")
    if record.get("version") != VERSION:
        raise ValueError(
            f"it is not a record of version {VERSION} (its version is {record.get('version')!r})"
        )
    run = record.get("run")
    if not isinstance(run, dict):
        raise ValueError("it has no run")
    for name, kind in NAMES.items():
        if not isinstance(run.get(name), kind) or isinstance(run[name], bool):
            raise ValueError(f"its run.{name} is {run.get(name)!r}")
    for name in NUMBERS:
        if not is_number(record.get(name)):
            raise ValueError(f"its {name} is {record.get(name)!r}")
    for name in ("by_cell", "controls"):
        values = record.get(name, {})
        if not isinstance(values, dict) or not all(map(is_number, values.values())):
            raise ValueError(f"its {name} is not a table of numbers")
    _check_curve(record.get("curve", []))
    if not isinstance(record.get("hardware", {}), dict):
        raise ValueError(f"its hardware is {record['hardware']!r}")


def _check_curve(curve: Any) -> None:
    if not isinstance(curve, list):
        raise ValueError("its curve is not a list")
    for point in curve:
        if not (isinstance(point, list) and len(point) == 3 and is_number(point[0])):
            raise ValueError(f"its curve has a point {point!r}")
        if any(value is not None and not is_number(value) for value in point[1:]):
            raise ValueError(f"its curve has a point {point!r}")


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number.

    >>> [is_number(value) for value in (1, 0.5, float("nan"), True, "1")]
    [True, True, False, False, False]
    """
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST


def select(records: Iterable[Record], experiment: str, preset: str | None = None) -> list[Record]:
    """Keep the records of an experiment, and of one preset if it is named."""
    return [
        record
        for record in records
        if record["run"]["experiment"] == experiment and preset in (None, record["run"]["preset"])
    ]


def stale(records: Sequence[Record], experiment: Experiment, preset: str) -> list[Record]:
    """Return the records whose settings are no longer those of the preset."""
    seeds = sorted({record["run"]["seed"] for record in records})
    if not seeds or preset not in experiment.presets:
        return []
    current = {run.key for run in experiment.runs(preset, seeds)}
    return [record for record in records if record.get("key") not in current]
