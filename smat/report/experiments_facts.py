"""What a set of runs took: machines, minutes, commits, days."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from smat.report.experiments_data import Record

RANGE = "\N{EN DASH}"


def facts_of(records: Sequence[Record]) -> dict[str, str]:
    """Say how many runs there are, how long they took, where, and of which commit.

    >>> record = {"minutes": 3.0, "hardware": {"cpu": "EPYC", "cores": 2, "torch": "2.13.0"}}
    >>> facts_of([record, {**record, "minutes": 6.0}])
    {'runs': '2', 'time': '9.0 min in all, 4.5 min a run (3.0 min to 6.0 min)',
     'machine': 'EPYC, 2 cores, torch 2.13.0'}
    """
    if not records:
        return {"runs": "none"}
    minutes = [record["minutes"] for record in records]
    took = f"{format_minutes(sum(minutes))} in all"
    if len(minutes) > 1:
        least, most = format_minutes(min(minutes)), format_minutes(max(minutes))
        span = f" ({least} to {most})" if least != most else ""
        took += f", {format_minutes(fmean(minutes))} a run{span}"
    facts = {
        "runs": str(len(records)),
        "time": took,
        "machine": "; ".join(machines_of(records)),
        "commit": some_of(commits_of(records)),
        "finished": days_of(records),
    }
    return {name: text for name, text in facts.items() if text}


def machines_of(records: Iterable[Record]) -> list[str]:
    """List the machines that records come from, each once."""
    return _once(format_hardware(record.get("hardware", {})) for record in records)


def commits_of(records: Iterable[Record]) -> list[str]:
    """List the commits that records come from, abbreviated; a + marks changed sources.

    >>> commits_of([{"commit": "0123456789abcdef+"}, {"commit": None}])
    ['0123456789+']
    """
    commits = [str(record.get("commit") or "") for record in records]
    return _once(commit[:10] + "+" * commit.endswith("+") for commit in commits)


def days_of(records: Iterable[Record]) -> str:
    """Return the days between which runs finished."""
    days = sorted(_once(str(record.get("finished") or "")[:10] for record in records))
    return f"{days[0]} to {days[-1]}" if len(days) > 1 else "".join(days)


def some_of(texts: Sequence[str], most: int = 3) -> str:
    """Join texts, the first few only if there are many.

    >>> some_of(["a", "b", "c", "d", "e"])
    'a, b, c and 2 more'
    """
    if len(texts) <= most + 1:
        return ", ".join(texts)
    return f"{', '.join(texts[:most])} and {len(texts) - most} more"


def _once(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def format_hardware(hardware: dict[str, Any]) -> str:
    """Write a machine on one line.

    >>> format_hardware({"cpu": "AMD EPYC", "cores": 2, "torch": "2.13.0", "device": "cuda:0"})
    'AMD EPYC, 2 cores, torch 2.13.0, cuda:0'
    """
    parts = [str(hardware.get("cpu") or "")]
    if hardware.get("cores"):
        parts.append(f"{hardware['cores']} core{'s' * (hardware['cores'] != 1)}")
    if hardware.get("torch"):
        parts.append(f"torch {hardware['torch']}")
    device = str(hardware.get("device") or "")
    parts.append("" if device == "cpu" else device)
    return ", ".join(filter(None, parts))


def format_minutes(minutes: float) -> str:
    """Write a time in the unit that suits it.

    >>> [format_minutes(minutes) for minutes in (0.5, 12, 90, 1440 * 3)]
    ['30 s', '12 min', '1.5 h', '72 h']
    """
    if minutes < 1:
        return f"{60 * minutes:.0f} s"
    if minutes < 60:
        return f"{_minutes(minutes)} min"
    return f"{minutes / 60:.1f} h" if minutes < 600 else f"{minutes / 60:.0f} h"


def _minutes(minutes: float) -> str:
    """Two digits that matter."""
    return f"{minutes:.0f}" if minutes >= 10 else f"{minutes:.1f}" if minutes >= 1 else (
        f"{minutes:.2f}"
    )  # fmt: skip


def minutes_a_run(records: Sequence[Record]) -> str:
    """Return the mean minutes of a run, or nothing where there is none."""
    return _minutes(fmean(record["minutes"] for record in records)) if records else ""


def parameters_of(records: Sequence[Record]) -> str:
    """Return the number of parameters, or from the least to the most.

    >>> parameters_of([{"parameters": 58088}, {"parameters": 1360000}])
    '58 K–1.4 M'
    """
    counts = sorted({record["parameters"] for record in records if record.get("parameters")})
    texts = _once(format_count(count) for count in counts)
    return RANGE.join([texts[0], texts[-1]] if len(texts) > 1 else texts)


def format_count(count: int) -> str:
    """Write a count in thousands or millions.

    >>> [format_count(count) for count in (640, 8123, 58088, 26_900_000)]
    ['640', '8.1 K', '58 K', '27 M']
    """
    for limit, unit in ((1_000_000, "M"), (1000, "K")):
        if count >= 0.9995 * limit:
            return f"{count / limit:.1f} {unit}" if count < 9.95 * limit else (
                f"{count / limit:.0f} {unit}"
            )  # fmt: skip
    return str(count)


def seeds_of(counts: Sequence[int]) -> str:
    """Write a number of seeds, or from the fewest to the most.

    >>> seeds_of([3]), seeds_of([1, 2, 3]), seeds_of([])
    ('3', '1–3', '')
    """
    return RANGE.join(map(str, (counts[0], counts[-1]) if len(counts) > 1 else counts))
