"""Read the records of finished runs and the paper's tables, and write what they say as text."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_HALF_UP, Decimal
from importlib.resources import files
from math import isnan
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from smat.experiments.run import PRECISIONS, Experiment

PaperTable = Mapping[str, Any]  # one table of published.json
Published = Mapping[str, PaperTable]

NOTHING = "\N{EN DASH}"  # neither run nor to be run: the paper has no number here
ROW_UNITS = "as in the row"
PER_CENT = "%"
NO_RUNS = ("runs", "costs")  # folders of unfinished work, and of costs
# What else the paper says about the runs of a table: seed by seed, levels, fractions.
DETAILS = {
    "tab:mkar": ("tab:mkar-seeds", "text:mkar-chance", "fig:mkar-sanity"),
    "tab:mqar-uniform": ("tab:mqar-placed/routed",),
    "tab:pg19-300m": ("text:pg19-parameters", "text:pg19-memory"),
}


class RecordWarning(UserWarning):
    """A JSON file among the records is not a record of a run."""


class RunName(BaseModel):
    """Which run it was."""

    model_config = ConfigDict(strict=True, frozen=True)

    experiment: str
    preset: str
    arm: str
    cell: str
    seed: int


class Record(BaseModel):
    """What a finished run left; a point of its curve is a step, a loss and an accuracy."""

    model_config = ConfigDict(strict=True, frozen=True)

    version: Literal[1]
    run: RunName
    accuracy: FiniteFloat
    loss: FiniteFloat
    minutes: FiniteFloat
    unit: str = PER_CENT  # of accuracy and by_cell, which are losses in any other
    tokens_per_second: FiniteFloat | None = None
    key: str = ""
    by_cell: dict[str, FiniteFloat] = {}
    controls: dict[str, FiniteFloat] = {}
    curve: list[tuple[FiniteFloat, FiniteFloat | None, FiniteFloat | None]] = []
    parameters: int | None = None
    hardware: dict[str, Any] = {}
    commit: str | None = None
    finished: str = ""


def load_records(roots: Iterable[str | Path]) -> list[Record]:
    """Read the records below the roots; a run that several roots hold counts in the first.

    >>> load_records(["no/such/folder"])
    []

    A root is a folder of records, or holds one by the name `records`. A file that is not a record
    is skipped with a warning that names it.
    """
    found: dict[tuple[RunName, str], Record] = {}
    for path in (path for root in map(Path, roots) for path in _files(root)):
        try:
            record = Record.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            problem = " ".join(str(error).split())
            warnings.warn(f"skipped {path}: {problem}", RecordWarning, stacklevel=2)
        else:
            found.setdefault((record.run, record.key), record)
    return list(found.values())


def _files(root: Path) -> Iterator[Path]:
    folder = root / "records" if (root / "records").is_dir() else root
    for path in sorted(folder.rglob("*.json")):
        if path.relative_to(root).parts[0] not in NO_RUNS:
            yield path


def select(records: Iterable[Record], experiment: str, preset: str) -> list[Record]:
    """Keep the records of one preset of an experiment."""
    return [r for r in records if (r.run.experiment, r.run.preset) == (experiment, preset)]


def select_current(
    records: Iterable[Record], experiment: Experiment, preset: str
) -> tuple[list[Record], str]:
    """Keep the records of a preset as it is now, and say how many others are left out.

    Where a run has none, that of another precision stands for it, and what is said counts it too.
    """
    found = select(records, experiment.name, preset)
    if not found or preset not in experiment.presets:
        return found, ""
    seeds = sorted({record.run.seed for record in found})
    own = {run.key for run in experiment.runs(preset, seeds)}
    precision_of = {
        run.key: name
        for name, precision in PRECISIONS.items()
        for run in experiment.with_training(precision=precision).runs(preset, seeds)
        if run.key not in own
    }
    have = {record.run for record in found if record.key in own}
    shown = [r for r in found if r.key in own or (r.key in precision_of and r.run not in have)]
    notes, num_old = [], len(found) - len(shown)
    if num_old:
        made = f"{num_old} of {len(found)} runs were made with other settings"
        notes.append(f"{made} than the preset {preset} has now, and are not shown.")
    others = Counter(precision_of[record.key] for record in shown if record.key not in own)
    notes += [f"{n} of {len(shown)} runs were trained in {name}." for name, n in others.items()]
    return shown, " ".join(notes)


def facts_of(records: Sequence[Record]) -> dict[str, str]:
    """Say how many runs there are, how long they took, where, and of which commits.

    >>> facts_of([])
    {'runs': 'none'}

    A + marks a commit whose sources were changed.
    """
    if not records:
        return {"runs": "none"}
    minutes = [record.minutes for record in records]
    least, most = format_minutes(min(minutes)), format_minutes(max(minutes))
    took = f"{format_minutes(sum(minutes))} in all"
    took += f", {format_minutes(fmean(minutes))} a run" if len(minutes) > 1 else ""
    took += f" ({least} to {most})" if least != most else ""
    names = [record.commit for record in records if record.commit]
    commits = list(dict.fromkeys(name[:10] + "+" * name.endswith("+") for name in names))
    if len(commits) > 4:
        commits = [*commits[:2], f"{commits[2]} and {len(commits) - 3} more"]
    days = sorted({record.finished[:10] for record in records if record.finished})
    facts = {
        "runs": str(len(records)),
        "time": took,
        "machine": "; ".join(dict.fromkeys(_machine(record.hardware) for record in records)),
        "commit": ", ".join(commits),
        "finished": " to ".join(dict.fromkeys([*days[:1], *days[-1:]])),
    }
    return {name: text for name, text in facts.items() if text}


def _machine(hardware: dict[str, Any]) -> str:
    cores, torch, device = (hardware.get(name) for name in ("cores", "torch", "device"))
    texts = [hardware.get("cpu"), cores and f"{cores} core{'s' * (cores != 1)}"]
    texts += [torch and f"torch {torch}", device if device != "cpu" else None]
    return ", ".join(filter(None, texts))


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


def format_minutes(minutes: float) -> str:
    """Write a time in the unit that suits it, with two digits that matter.

    >>> [format_minutes(minutes) for minutes in (0.5, 4.5, 12, 90, 1440 * 3)]
    ['30 s', '4.5 min', '12 min', '1.5 h', '72 h']
    """
    if minutes < 1:
        return f"{60 * minutes:.0f} s"
    number, unit = (minutes, "min") if minutes < 60 else (minutes / 60, "h")
    return f"{number:.{int(number < 10)}f} {unit}"


def format_count(count: int) -> str:
    """Write a count in thousands or millions.

    >>> [format_count(count) for count in (640, 8123, 58088, 26_900_000)]
    ['640', '8.1 K', '58 K', '27 M']
    """
    for limit, unit in ((1_000_000, "M"), (1000, "K")):
        if count >= 0.9995 * limit:
            return f"{count / limit:.{int(count < 9.95 * limit)}f} {unit}"
    return str(count)


def is_loss(name: str) -> bool:
    """Tell a control that is a loss from one that is an accuracy in per cent, by its name."""
    return any(word in name.lower() for word in ("loss", "nats"))


def format_value(mean: float, std: float | None = None, decimals: int = 1) -> str:
    """Write a mean, and the deviation where there is one.

    >>> format_value(98.25, 0.4), format_value(46.55), format_value(-0.001)
    ('98.3 ± 0.4', '46.6', '0.0')

    Rounded are the digits that Python prints: 46.55 becomes 46.6, though its binary form is less.
    """
    unit = Decimal(1).scaleb(-decimals)
    numbers = [number for number in (mean, std) if number is not None and not isnan(number)]
    digits = [Decimal(repr(float(number))).quantize(unit, ROUND_HALF_UP) for number in numbers]
    return " ± ".join(f"{number if number else abs(number):f}" for number in digits)
