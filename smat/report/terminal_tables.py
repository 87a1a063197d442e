"""Tables for a terminal: rows of benchmarks, and the sizes that T and d imply (Section 3)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from rich.table import Table

from smat.console import WIDTH
from smat.masks.mask import SMatMask, SMatWarning

Row = Mapping[str, Any]

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
# The fields of rows in the order of their columns, and what stands over each.
HEADINGS = {
    "compiled_for": "device", "kernel": "kernel", "width": "K = V", "forms": "forms",
    "registers": "registers", "spilled_bytes": "spilled", "shared_bytes": "shared",
    "warps": "warps", "blocks": "blocks at once", "occupancy": "occupancy", "limit": "limited by",
    "batch": "batch", "seq_len": "T", "context": "context", "name": "what", "kind": "kind",
    "heads": "heads", "size": "at", "error": "error", "quantity": "worst",
    "tolerance": "tolerance", "vc_dim": "d", "field_size": "q", "num_profiles": "P",
    "num_types": "B", "num_distant": "n", "num_recent": "m", "guarantees_vc_dim": "VC = d",
    "method": "form", "additions": "additions", "additions_algorithm2": "additions,\nAlgorithm 2",
    "additions_factored": "additions,\nfactored", "cache_states": "cache,\nstates",
    "median": "median", "low": "20 %", "high": "80 %", "num_runs": "runs", "slowest": "slowest",
    "pass": "pass", "dtype": "dtype", "chunk": "chunk", "moved_bytes": "moved",
    "least_bytes": "least", "ratio_to_least": "x least", "torch_bytes": "by torch\nbeside",
    "estimate_a100": "estimate (ms),\nA100 80 GB", "estimate_h100": "H100 SXM",
    "estimate_mi300x": "MI300X",
    "work": "work\nx d=1", "window_step": "window,\nstep", "window_bytes": "window,\ncache",
    "window_work": "window,\nwork", "ratio": "ratio", "baseline": "to",
    "ratio_to_factored": "x factored", "ratio_to_d1": "x d=1",
    "ratio_to_plain": "x plain", "ratio_to_shortest": "x shortest", "softmax_ratio": "softmax x",
    "slowest_to_median": "slowest / median", "io_bytes": "in + out", "kept_bytes": "kept",
    "working_bytes": "working", "peak_extra_bytes": "peak extra", "bound_bytes": "bound",
    "cache_bytes": "cache", "bytes": "needs", "minor_faults": "faults", "major_faults": "major",
    "peak_bytes": "peak", "parameters": "parameters", "exponent": "exponent", "gemm": "product",
    "causal_branch": "causal branch",
    "fraction_of_gemm": "fraction", "whole_op_fraction_of_gemm": "whole op, d = 1",
    "why": "why",
}  # fmt: skip
MILLISECONDS = ("median", "low", "high", "slowest")
# What says which row it is, and what may be broken into lines.
KEYS = ("compiled_for", "kernel", "width", "batch", "seq_len", "context", "name", "vc_dim",
        "field_size", "method", "pass", "dtype")  # fmt: skip
PROSE, LEAST_PROSE = ("why",), 30


def rows_tables(title: str, rows: Sequence[Row], ruled_by: str | None = None) -> Iterator[Table]:
    """Set rows out, a column for every known field, with a rule where one of them changes.

    What is too wide for one table goes on in another, which begins with the same names.
    """
    flat = [{**row, **row.get("timing", {})} for row in rows]
    columns = {
        name: [_text(name, row.get(name)) for row in flat]
        for name in HEADINGS
        if any(row.get(name) is not None for row in flat)
    }
    ends = [
        ruled_by is not None and row[ruled_by] != following.get(ruled_by)
        for row, following in zip(flat, [*flat[1:], {}], strict=False)
    ]
    for names in _fitting(columns):
        table = Table(title=title, title_justify="left", header_style="bold")
        for name in names:
            words = any(isinstance(row.get(name), str) for row in flat)
            justify: Literal["left", "right"] = "left" if words else "right"
            table.add_column(HEADINGS[name], justify=justify, no_wrap=name not in PROSE)
        for *texts, is_end in zip(*(columns[name] for name in names), ends, strict=True):
            table.add_row(*texts, end_section=is_end)
        yield table


def _fitting(columns: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Spread columns over tables of at most `WIDTH`, each with those that say what a row is."""
    width = {
        name: 3 + max(map(len, [*HEADINGS[name].split("\n"), *texts]))
        for name, texts in columns.items()
        if name not in PROSE
    }
    keys = [name for name in columns if name in KEYS]
    blocks = [keys.copy()]
    for name in columns:
        if name in keys:
            continue
        needed = sum(width.get(each, LEAST_PROSE) for each in (*blocks[-1], name))
        if needed >= WIDTH and len(blocks[-1]) > len(keys):
            blocks.append(keys.copy())
        blocks[-1].append(name)
    return [[name for name in columns if name in block] for block in blocks]


def worst_checks(checks: Sequence[Row]) -> list[Row]:
    """Keep, of the checks of each name, the one whose error is largest beside its tolerance."""
    by_error = sorted(checks, key=lambda check: check["error"] / check["tolerance"])
    worst = {check["name"]: check for check in by_error}  # the last one counts
    return [worst[name] for name in dict.fromkeys(check["name"] for check in checks)]


def _text(name: str, value: str | float | None) -> str:
    """Write a field: sizes with their unit, times in milliseconds, three digits that matter.

    >>> _text("cache_bytes", 4224), _text("median", 0.0123), _text("error", 1.5e-7)
    ('4.2 kB', '12.3', '1.50e-07')
    """
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("bytes"):
        return format_bytes(value)
    value *= 1e3 if name in MILLISECONDS else 1
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:#.3g}"


def format_bytes(num_bytes: float) -> str:
    """Write a size in decimal units; megabytes are whole, as in the paper's table.

    >>> [format_bytes(size) for size in (4224, 540672, 99483648, 3439214592, 27513716736)]
    ['4.2 kB', '0.5 MB', '99 MB', '3439 MB', '27.5 GB']
    """
    if num_bytes < 100_000:
        return f"{num_bytes / 1e3:.1f} kB"
    if num_bytes < 10_000_000_000:
        return f"{num_bytes / 1e6:.{int(num_bytes < 10_000_000)}f} MB"
    return f"{num_bytes / 1e9:.1f} GB"


def geometry_row(
    seq_len: int,
    vc_dim: int,
    chunk_size: int = 64,
    *,
    heads: int = 1,
    key_dim: int = 32,
    value_dim: int = 32,
    batch: int = 1,
    dtype: str = "fp32",
) -> dict[str, int]:
    """Work out the sizes, the cost of tabulation and the decode cache for one VC dimension.

    >>> row = geometry_row(seq_len=1024, vc_dim=3, batch=64)
    >>> row["field_size"], row["num_types"], row["cache_bytes"] / 1e6
    (11, 132, 35.954688)

    A length without a distant block is plain linear attention: one running state and no tables.

    Paper: q = `field_size`, P = `num_profiles`, B = `num_types`, n = `num_distant`,
    m = `num_recent`; the cache holds B + 1 states of r x p numbers (Section 3.3, Theorems 2, 3).
    """
    sizes = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "batch": batch}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be 1 or more, but it is {size}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SMatWarning)  # the row says whether VC = d is guaranteed
        mask = SMatMask(seq_len, vc_dim, chunk_size=chunk_size)
    geometry, has_distant = mask.geometry, mask.num_distant > 0
    cache_states = geometry.num_types + 1 if has_distant else 1
    state_bytes = batch * heads * key_dim * (value_dim + 1) * DTYPE_BYTES[dtype]
    return {
        "vc_dim": vc_dim,
        "field_size": geometry.field_size,
        "num_profiles": geometry.num_profiles,
        "num_types": geometry.num_types,
        "num_distant": mask.num_distant,
        "num_recent": mask.num_recent,
        "guarantees_vc_dim": mask.guarantees_vc_dim,
        "additions_algorithm2": geometry.tabulation_cost("algorithm2") if has_distant else 0,
        "additions_factored": geometry.tabulation_cost("factored") if has_distant else 0,
        "cache_states": cache_states,
        "cache_bytes": cache_states * state_bytes,
    }
