"""Set the costs of whole models beside the paper's (tab:e2e-routing), as ratios to d = 1."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smat.bench.model_configs import MODELS, YARDSTICK
from smat.extras import require
from smat.report.experiment_tables import LINE, OURS, PAPER, Table
from smat.report.records import NOTHING, PaperTable, Published
from smat.report.terminal_tables import format_bytes

pd = require("pandas", extra="cli")

LABEL, FOLDER = "tab:e2e-routing", "costs"
PASSES = {"train": "training step", "prefill": "prefill", "decode": "one token"}
MEMORY = {"cache_bytes": "cache a sequence", "peak_extra_bytes": "peak memory"}
PAPER_BATCH = 64


@dataclass(frozen=True)
class Costs(Table):
    """A table of costs, and where, when and how it was measured."""

    name: str
    facts: Mapping[str, str]


def load_benchmarks(roots: Iterable[str | Path], benchmark: str) -> dict[str, Mapping[str, Any]]:
    """Read the records of one benchmark below the roots; a name counts in the first root."""
    paths = [path for root in roots for path in sorted((Path(root) / FOLDER).glob("*.json"))]
    first = {path.stem: path for path in reversed(paths)}
    found = {path.stem: json.loads(first[path.stem].read_text()) for path in paths}
    return {name: each for name, each in found.items() if each["benchmark"] == benchmark}


def load_costs(roots: Iterable[str | Path], published: Published) -> list[Costs]:
    """Arrange what `smat bench models` left below the roots."""
    found = load_benchmarks(roots, "models")
    return [cost_table(name, record, published[LABEL]) for name, record in found.items()]


def cost_table(name: str, record: Mapping[str, Any], paper: PaperTable) -> Costs:
    """Arrange a record of `smat bench models`: a line a model, the paper's lines below it."""
    rows = {(row["name"], row["pass"], row["seq_len"]): row for row in record["rows"]}
    columns = list(dict.fromkeys((row["pass"], row["seq_len"]) for row in record["rows"]))
    headings = {f"{kind}_{short(n)}": f"{PASSES[kind]}, {short(n).upper()}" for kind, n in columns}
    lines: dict[tuple[str, str, str], list[str]] = {}
    for arm, (label, _) in MODELS.items():
        own = [rows.get((arm, *column)) for column in columns]
        if not any(own):
            continue
        memory = [_memory(own, field, record["config"]["batch"]) for field in MEMORY]
        lines[arm, OURS, label] = [*map(_time, own), *memory]
        for suffix, source in (("_kernel", "paper, optimised kernels"), ("", "paper")):
            if arm + suffix not in paper["values"]:
                continue
            times = [_of_paper(paper, arm + suffix, column) for column in headings]
            if set(times) != {NOTHING}:
                sizes = [_cache_of_paper(paper, arm + suffix), NOTHING]
                lines[arm, PAPER, source] = [*times, *sizes]
    index = pd.MultiIndex.from_tuples(list(lines), names=LINE)
    headings |= MEMORY
    text = pd.DataFrame(list(lines.values()), index=index, columns=list(headings))
    if set(text["peak_extra_bytes"]) == {NOTHING}:  # it was not measured
        text = text.drop(columns=headings.popitem()[0])
    return Costs(headings, text, name, facts_of_costs(record))


def facts_of_costs(record: Mapping[str, Any]) -> dict[str, str]:
    """Say on what and how it was measured."""
    where, config = record["environment"], record["config"]
    device = where["device"] if where["device"] != "cpu" else where["processor"]
    worst = max(check["error"] for check in record["checks"])
    facts = {
        "machine": f"{device}, {where['num_threads']} threads, torch {where['torch']}",
        "sizes": f"batch {config['batch']}, one head of {config['head_dim']}, fp32",
        "checked": f"largest error {worst:.1e}, relative RMS against fp64",
        "commit": (where["commit"] or "")[:10],
        "measured": where["time"][:10],
    }
    return {name: text for name, text in facts.items() if text}


def short(length: int) -> str:
    """Write a length as the paper does.

    >>> short(16384), short(1000)
    ('16k', '1000')
    """
    return str(length) if length % 1024 else f"{length // 1024}k"


def _time(row: Mapping[str, Any] | None) -> str:
    """Write a ratio to d = 1 and the time behind it."""
    if row is None:
        return NOTHING
    return _with_ratio(row["ratio_to_d1"], 1e3 * row["timing"]["median"])


def _with_ratio(ratio: float, milliseconds: float) -> str:
    """Write both with the digits that matter.

    >>> _with_ratio(1.094, 14.1), _with_ratio(65.4, 3147.9)
    ('1.09 × (14.1 ms)', '65 × (3,148 ms)')
    """
    ratio_text = f"{ratio:,.0f}" if ratio >= 20 else f"{ratio:.3g}"
    time = f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"
    return f"{ratio_text} × ({time} ms)"


def _of_paper(paper: PaperTable, arm: str, column: str) -> str:
    """Write the paper's time at the same length, relative to its own d = 1."""
    column = "decode" if column == "decode_256k" else column
    number, yardstick = (
        (paper["values"][each].get(column) or [None])[0] for each in (arm, YARDSTICK)
    )
    if number is None:
        return paper.get("text", {}).get(arm, {}).get(column, NOTHING)
    return _with_ratio(number / yardstick, number) if yardstick else f"{number:,.0f} ms"


def _cache_of_paper(paper: PaperTable, arm: str) -> str:
    megabytes = paper["values"][arm]["cache"][0]
    return NOTHING if megabytes is None else format_bytes(1e6 * megabytes / PAPER_BATCH)


def _memory(rows: Iterable[Mapping[str, Any] | None], field: str, batch: int) -> str:
    """Write the largest of what the passes needed, of a cache what one sequence does."""
    shared = batch if field == "cache_bytes" else 1
    sizes = [row[field] / shared for row in rows if row and row.get(field) is not None]
    return format_bytes(max(sizes)) if sizes else NOTHING
