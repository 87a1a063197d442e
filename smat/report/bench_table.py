"""Set benchmarks out as tables: what was checked, how long it took, what it needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.table import Table

from smat.report.figures import count_heads, format_length, format_sizes
from smat.report.geometry_table import format_bytes

Row = Mapping[str, Any]
Columns = Mapping[str, Callable[[Row], object]]  # a heading, and what stands below it
WORDS = ("what", "at", "form", "variant", "decoder", "kind", "to")  # columns set to the left


def check_table(checks: Sequence[Row]) -> Table:
    """One line a name: the largest error relative to its tolerance."""
    worst, names = {}, {}
    for check in sorted(checks, key=lambda check: check["error"] / check["tolerance"]):
        worst[check["name"]] = check
    for check in checks:
        quantity = check["quantity"].removeprefix("gradient of ")
        names.setdefault(check["name"], []).append(quantity)
    columns: Columns = {
        "what": lambda row: row["name"],
        "at": lambda row: row["size"],
        "error": lambda row: f"{row['error']:.1e}",
        "checked": lambda row: ", ".join(names[row["name"]]),
        "tolerance": lambda row: f"{row['tolerance']:.0e}",
    }
    title = "Checked against an oracle in fp64 (relative RMS)"
    return _table(title, [worst[name] for name in names], columns)


def tabulate_table(result: Mapping[str, Any]) -> Table:
    """One line a geometry and form."""
    columns: Columns = {
        "q": lambda row: row["field_size"],
        "d": lambda row: row["vc_dim"],
        "P": lambda row: f"{row['num_profiles']:,}",
        "B": lambda row: f"{row['num_types']:,}",
        "form": lambda row: row["method"],
        "additions": lambda row: f"{row['additions']:,}",
        **TIMES,
        "x factored": lambda row: _ratio(row["ratio_to_factored"]),
        "kept": lambda row: _bytes(row["kept_bytes"]),
        "working": lambda row: _bytes(row["working_bytes"]),
        "faults": lambda row: _faults(row["timing"]),
    }
    title = f"Tabulation, {result['config']['num_columns']} columns, fp32, milliseconds"
    return _table(title, result["rows"], columns, section=("field_size", "vc_dim"))


def attention_table(result: Mapping[str, Any]) -> Table:
    """One line a length and variant."""
    config, growth = result["config"], result["growth"]

    def variant(row: Row) -> str:
        fewer = row["heads"] != config["heads"]
        return row["name"] + (f", {count_heads(row['heads'])}" if fewer else "")

    def times_bound(row: Row) -> str:
        peak, bound = row["peak_extra_bytes"], row["bound_bytes"]
        return _ratio(peak / bound if peak is not None and bound else None)

    columns: Columns = {
        "T": lambda row: format_length(row["seq_len"]),
        "variant": variant,
        "q": lambda row: row["field_size"] or "-",
        **TIMES,
        "x d=1": lambda row: _ratio(row["ratio_to_d1"]),
        "x plain": lambda row: _ratio(row["ratio_to_plain"]),
        "softmax x": lambda row: _ratio(row["softmax_ratio"]),
        "in + out": lambda row: _bytes(row["io_bytes"]),
        "peak extra": lambda row: _bytes(row["peak_extra_bytes"]),
        "bound": lambda row: _bytes(row["bound_bytes"]),
        "x bound": times_bound,
        "faults": lambda row: _faults(row["timing"]),
        "exponent": lambda row: _optional(growth.get(row["name"]), "{:.2f}"),
    }
    passes = "Forward + backward" if config["backward"] else "Forward"
    sizes = f"batch {config['batch']}, chunk {config['chunk_size']}"
    title = f"{passes}, {format_sizes(config)}, {sizes}, milliseconds"
    return _table(title, result["rows"], columns, section=("seq_len",))


def rate_table(rates: Iterable[Row], gemm_size: int) -> Table:
    """One line a length: the matrix product and the causal branch, in GFLOP/s."""
    columns: Columns = {
        "T": lambda rate: format_length(rate["seq_len"]),
        "product": lambda rate: f"{rate['gemm']:.1f}",
        "causal branch": lambda rate: _optional(rate.get("causal_branch"), "{:.1f}"),
        "fraction": lambda rate: _optional(rate.get("fraction_of_gemm"), "{:.0%}"),
        "whole op, d = 1": lambda rate: _optional(rate.get("whole_op_fraction_of_gemm"), "{:.0%}"),
    }
    return _table(f"GFLOP/s, beside a {gemm_size}^3 product", rates, columns)


def decode_table(result: Mapping[str, Any]) -> Table:
    """One line a batch, decoder and context."""
    columns: Columns = {
        "batch": lambda row: row["batch"],
        "decoder": lambda row: row["name"],
        "context": lambda row: format_length(row["context"]),
        **TIMES,
        "slowest": lambda row: _milliseconds(row["timing"]["slowest"]),
        "x shortest": lambda row: _ratio(row["ratio_to_shortest"]),
        "softmax x": lambda row: _ratio(row["softmax_ratio"]),
        "slowest / median": lambda row: _ratio(row["slowest_to_median"]),
        "cache": lambda row: _bytes(row["cache_bytes"]),
    }
    rows = sorted(result["rows"], key=lambda row: (row["batch"], row["name"], row["context"]))
    title = f"Decoding, {format_sizes(result['config'])}, milliseconds a token"
    return _table(title, rows, columns, section=("batch", "name"))


def layers_table(result: Mapping[str, Any]) -> Table:
    """One line a recurrence or layer."""
    config = result["config"]
    columns: Columns = {
        "what": lambda row: row["name"],
        "kind": lambda row: row["kind"],
        **TIMES,
        "ratio": lambda row: "" if row["baseline"] == row["name"] else _ratio(row["ratio"]),
        "to": lambda row: "" if row["baseline"] == row["name"] else row["baseline"],
    }
    sizes = f"T = {config['seq_len']}, batch {config['batch']}, {config['heads']} heads of "
    reads = f"d = {config['vc_dim']}, {config['num_reads']} reads"
    title = f"Forward + backward, {sizes}{config['head_dim']}, fp32, {reads}, milliseconds"
    return _table(title, result["rows"], columns, section=("baseline",))


def _table(title: str, rows: Iterable[Row], columns: Columns, section: Sequence[str] = ()) -> Table:
    """Set rows out, with a rule where one of the fields named by `section` changes."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in columns:
        table.add_column(heading, justify="left" if heading in WORDS else "right", no_wrap=True)
    last = None
    for row in rows:
        place = [row[name] for name in section]
        if last not in (None, place):
            table.add_section()
        last = place
        table.add_row(*(str(text(row)) for text in columns.values()))
    return table


def _milliseconds(seconds: float) -> str:
    """Three digits that matter, and never an exponent."""
    value = 1e3 * seconds
    return f"{value:.3f}" if value < 10 else f"{value:.{int(value < 100)}f}"


TIMES: Columns = {
    "median": lambda row: _milliseconds(row["timing"]["median"]),
    "20 %": lambda row: _milliseconds(row["timing"]["low"]),
    "80 %": lambda row: _milliseconds(row["timing"]["high"]),
    "runs": lambda row: row["timing"]["num_runs"],
}


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _optional(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _bytes(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else format_bytes(int(num_bytes))


def _faults(timing: Row) -> str:
    """Minor page faults a run, and major ones where there are any."""
    minor, major = round(timing["minor_faults"]), round(timing["major_faults"])
    return f"{minor:,}" if not major else f"{minor:,} + {major:,} major"
