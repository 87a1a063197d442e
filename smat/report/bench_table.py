"""Set benchmarks out as tables: what was checked, how long it took, what it needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from smat.report.geometry_table import format_bytes

Row = Mapping[str, Any]

# The fields of results in the order of their columns, and what stands over each.
HEADINGS = {
    "batch": "batch", "seq_len": "T", "name": "what", "context": "context", "kind": "kind",
    "size": "at", "error": "error", "quantities": "checked", "tolerance": "tolerance",
    "field_size": "q", "vc_dim": "d", "num_profiles": "P", "num_types": "B", "method": "form",
    "additions": "additions", "median": "median", "low": "20 %", "high": "80 %",
    "num_runs": "runs", "slowest": "slowest", "ratio": "ratio", "baseline": "to",
    "ratio_to_factored": "x factored", "ratio_to_d1": "x d=1", "ratio_to_plain": "x plain",
    "ratio_to_shortest": "x shortest", "softmax_ratio": "softmax x",
    "slowest_to_median": "slowest / median", "io_bytes": "in + out", "kept_bytes": "kept",
    "working_bytes": "working", "peak_extra_bytes": "peak extra", "bound_bytes": "bound",
    "ratio_to_bound": "x bound", "cache_bytes": "cache", "minor_faults": "faults",
    "major_faults": "major", "exponent": "exponent", "gemm": "product",
    "causal_branch": "causal branch", "fraction_of_gemm": "fraction",
    "whole_op_fraction_of_gemm": "whole op, d = 1",
}  # fmt: skip
MILLISECONDS = ("median", "low", "high", "slowest")


def check_table(checks: Sequence[Row]) -> Table:
    """One line a name: the largest error relative to its tolerance."""
    by_name: dict[str, list[Row]] = {}
    for check in checks:
        by_name.setdefault(check["name"], []).append(check)
    rows = []
    for same in by_name.values():
        worst = max(same, key=lambda check: check["error"] / check["tolerance"])
        quantities = [check["quantity"].removeprefix("gradient of ") for check in same]
        rows.append({**worst, "quantities": ", ".join(quantities)})
    return _table("Checked against an oracle in fp64 (relative RMS)", rows)


def tabulate_table(result: Mapping[str, Any]) -> Table:
    """One line a geometry and form."""
    title = f"Tabulation, {result['config']['num_columns']} columns, fp32, milliseconds"
    return _table(title, result["rows"], sections_by=("field_size", "vc_dim"))


def attention_table(result: Mapping[str, Any]) -> Table:
    """One line a length and variant."""
    config, rows = result["config"], []
    for row in result["rows"]:
        peak, bound = row["peak_extra_bytes"], row["bound_bytes"]
        heads = "" if row["heads"] == config["heads"] else f", {count_heads(row['heads'])}"
        ratio = peak / bound if peak is not None and bound else None
        exponent = result["growth"].get(row["name"])
        derived = {"name": row["name"] + heads, "ratio_to_bound": ratio, "exponent": exponent}
        rows.append({**row, **derived})
    passes = "Forward + backward" if config["backward"] else "Forward"
    sizes = f"batch {config['batch']}, chunk {config['chunk_size']}"
    title = f"{passes}, {format_sizes(config)}, {sizes}, milliseconds"
    return _table(title, rows, sections_by=("seq_len",))


def rate_table(rates: Sequence[Row], gemm_size: int) -> Table:
    """One line a length: the matrix product and the causal branch, in GFLOP/s."""
    return _table(f"GFLOP/s, beside a {gemm_size}^3 product", rates)


def decode_table(result: Mapping[str, Any]) -> Table:
    """One line a batch, decoder and context."""
    rows = sorted(result["rows"], key=lambda row: (row["batch"], row["name"], row["context"]))
    title = f"Decoding, {format_sizes(result['config'])}, milliseconds a token"
    return _table(title, rows, sections_by=("batch", "name"))


def layers_table(result: Mapping[str, Any]) -> Table:
    """One line a recurrence or layer."""
    config = result["config"]
    sizes = f"T = {config['seq_len']}, batch {config['batch']}, {config['heads']} heads of "
    reads = f"d = {config['vc_dim']}, {config['num_reads']} reads"
    title = f"Forward + backward, {sizes}{config['head_dim']}, fp32, {reads}, milliseconds"
    return _table(title, result["rows"], sections_by=("baseline",))


def _table(title: str, rows: Sequence[Row], sections_by: Sequence[str] = ()) -> Table:
    """Set rows out, with a rule where one of the fields named by `sections_by` changes."""
    flat = [{**row, **row.get("timing", {})} for row in rows]
    columns = [name for name in HEADINGS if any(row.get(name) is not None for row in flat)]
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in columns:
        words = any(isinstance(row.get(name), str) for row in flat)
        table.add_column(HEADINGS[name], justify="left" if words else "right", no_wrap=True)
    for number, row in enumerate(flat):
        if number and any(row[name] != flat[number - 1][name] for name in sections_by):
            table.add_section()
        table.add_row(*(_text(name, row.get(name)) for name in columns))
    return table


def _text(name: str, value: str | float | None) -> str:
    """Write a field: sizes with their unit, times in milliseconds, three digits that matter.

    >>> _text("cache_bytes", 4224), _text("median", 0.0123), _text("error", 1.5e-7)
    ('4.2 kB', '12.3', '1.50e-07')
    """
    if value is None or isinstance(value, str):
        return value or "-"
    if name.endswith("bytes"):
        return format_bytes(value)
    value *= 1e3 if name in MILLISECONDS else 1
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:#.3g}"


def format_sizes(config: Mapping[str, Any]) -> str:
    """Write the sizes of a problem on one line."""
    heads, key_dim, value_dim = (config[name] for name in ("heads", "key_dim", "value_dim"))
    return f"{count_heads(heads)}, K = {key_dim}, V = {value_dim}, {config['dtype']}"


def count_heads(heads: int) -> str:
    """Write a number of heads."""
    return f"{heads} head{'s' * (heads != 1)}"
