"""Set benchmarks out as tables: what was checked, how long it took, what it needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from smat.report.bench_figure import count_heads, format_length, format_sizes
from smat.report.geometry_table import format_bytes

Row = Mapping[str, Any]
TIMES = ("median", "20 %", "80 %", "runs")


def check_table(checks: Sequence[Row]) -> Table:
    """One line a name: the largest error relative to its tolerance."""
    table = _table("Checked against an oracle in fp64 (relative RMS)", "what", "at")
    _columns(table, "error", "checked", "tolerance")
    for name in dict.fromkeys(check["name"] for check in checks):
        same = [check for check in checks if check["name"] == name]
        worst = max(same, key=lambda check: check["error"] / check["tolerance"])
        table.add_row(
            name, worst["size"], f"{worst['error']:.1e}",
            ", ".join(check["quantity"].removeprefix("gradient of ") for check in same),
            f"{worst['tolerance']:.0e}",
        )  # fmt: skip
    return table


def tabulate_table(result: Mapping[str, Any]) -> Table:
    """One line a geometry and form."""
    config = result["config"]
    table = _table(f"Tabulation, {config['num_columns']} columns, fp32, milliseconds", "q", "d")
    _columns(table, "P", "B")
    table.add_column("form", no_wrap=True)
    _columns(table, "additions", *TIMES, "x factored", "kept", "working", "faults")
    last = None
    for row in result["rows"]:
        case = row["field_size"], row["vc_dim"]
        if last not in (None, case):
            table.add_section()
        last = case
        table.add_row(
            str(case[0]), str(case[1]), f"{row['num_profiles']:,}", f"{row['num_types']:,}",
            row["method"], f"{row['additions']:,}", *_times(row["timing"]),
            _ratio(row["ratio_to_factored"]), _bytes(row["kept_bytes"]),
            _bytes(row["working_bytes"]), _faults(row["timing"]),
        )  # fmt: skip
    return table


def attention_table(result: Mapping[str, Any]) -> Table:
    """One line a length and variant."""
    config = result["config"]
    passes = "Forward + backward" if config["backward"] else "Forward"
    sizes = f"batch {config['batch']}, chunk {config['chunk_size']}"
    title = f"{passes}, {format_sizes(config)}, {sizes}, milliseconds"
    table = _table(title, "T", "variant")
    _columns(table, "q", *TIMES, "x d=1", "x plain", "softmax x", "in + out", "peak extra", "bound")
    _columns(table, "x bound", "faults", "exponent")
    last = None
    for row in result["rows"]:
        if last not in (None, row["seq_len"]):
            table.add_section()
        last = row["seq_len"]
        peak, bound = row["peak_extra_bytes"], row["bound_bytes"]
        heads = "" if row["heads"] == config["heads"] else f", {count_heads(row['heads'])}"
        exponent = result["growth"].get(row["name"])
        table.add_row(
            format_length(row["seq_len"]), row["name"] + heads, str(row["field_size"] or "-"),
            *_times(row["timing"]), _ratio(row["ratio_to_d1"]), _ratio(row["ratio_to_plain"]),
            _ratio(row["softmax_ratio"]), _bytes(row["io_bytes"]), _bytes(peak), _bytes(bound),
            _ratio(peak / bound if peak is not None and bound else None),
            _faults(row["timing"]), "-" if exponent is None else f"{exponent:.2f}",
        )  # fmt: skip
    return table


def rate_table(rates: Iterable[Row], gemm_size: int) -> Table:
    """One line a length: the matrix product and the causal branch, in GFLOP/s."""
    table = _table(f"GFLOP/s, beside a {gemm_size}^3 product", "T")
    _columns(table, "product", "causal branch", "fraction", "whole op, d = 1")
    for rate in rates:
        branch = rate.get("causal_branch")
        table.add_row(
            format_length(rate["seq_len"]), f"{rate['gemm']:.1f}",
            "-" if branch is None else f"{branch:.1f}",
            _percent(rate.get("fraction_of_gemm")),
            _percent(rate.get("whole_op_fraction_of_gemm")),
        )  # fmt: skip
    return table


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.0f} %"


def decode_table(result: Mapping[str, Any]) -> Table:
    """One line a batch, decoder and context."""
    title = f"Decoding, {format_sizes(result['config'])}, milliseconds a token"
    table = _table(title, "batch", "decoder", "context")
    _columns(table, *TIMES, "slowest", "x shortest", "softmax x", "slowest / median", "cache")
    rows = sorted(result["rows"], key=lambda row: (row["batch"], row["name"], row["context"]))
    last = None
    for row in rows:
        group = row["batch"], row["name"]
        if last not in (None, group):
            table.add_section()
        last = group
        table.add_row(
            str(row["batch"]), row["name"], format_length(row["context"]),
            *_times(row["timing"]), _milliseconds(row["timing"]["slowest"]),
            _ratio(row["ratio_to_shortest"]), _ratio(row["softmax_ratio"]),
            _ratio(row["slowest_to_median"]), _bytes(row["cache_bytes"]),
        )  # fmt: skip
    return table


def layers_table(result: Mapping[str, Any]) -> Table:
    """One line a recurrence or layer."""
    config = result["config"]
    sizes = f"T = {config['seq_len']}, batch {config['batch']}, {config['heads']} heads of "
    reads = f"d = {config['vc_dim']}, {config['num_reads']} reads"
    title = f"Forward + backward, {sizes}{config['head_dim']}, fp32, {reads}, milliseconds"
    table = _table(title, "what", "kind")
    _columns(table, *TIMES, "ratio")
    table.add_column("to", no_wrap=True)
    last = None
    for row in result["rows"]:
        if last not in (None, row["baseline"]):
            table.add_section()
        last = row["baseline"]
        alone = row["baseline"] == row["name"]
        table.add_row(
            row["name"], row["kind"], *_times(row["timing"]),
            "" if alone else _ratio(row["ratio"]), "" if alone else row["baseline"],
        )  # fmt: skip
    return table


def _table(title: str, *left: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in left:
        table.add_column(heading, no_wrap=True)
    return table


def _columns(table: Table, *headings: str) -> None:
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


def _times(timing: Row) -> list[str]:
    middle = [_milliseconds(timing[name]) for name in ("median", "low", "high")]
    return [*middle, str(timing["num_runs"])]


def _milliseconds(seconds: float) -> str:
    """Three digits that matter, and never an exponent."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _bytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else format_bytes(int(num_bytes))


def _faults(timing: Row) -> str:
    """Minor page faults a run, and major ones where there are any."""
    minor, major = round(timing["minor_faults"]), round(timing["major_faults"])
    return f"{minor:,}" if not major else f"{minor:,} + {major:,} major"
