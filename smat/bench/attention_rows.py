"""What timings of the op say: ratios, rates, growth, and memory beside the theorem's bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from smat.bench.attention_config import CAUSAL, GEMM, SOFTMAX, AttentionConfig, with_heads
from smat.bench.timing import Timing, growth_exponent
from smat.bench.workload import DTYPES, Shape, Variant


@dataclass(frozen=True)
class AttentionRow:
    """One variant at one length."""

    seq_len: int
    name: str
    vc_dim: int | None  # None for softmax
    gated: bool
    window_step: int | None
    heads: int
    field_size: int | None
    timing: Timing
    ratio_to_d1: float | None  # with the same gates
    ratio_to_plain: float | None  # to the same d without gates and with a fixed boundary
    softmax_ratio: float | None  # how many times longer softmax took, with compared_heads
    io_bytes: int
    peak_extra_bytes: int | None
    bound_bytes: float | None


def attention_rows(
    config: AttentionConfig,
    seq_len: int,
    timings: Mapping[str, Timing],
    peaks: Mapping[str, int],
) -> list[AttentionRow]:
    """Read one length's timings; `peaks` are extra bytes by variant, where they were measured."""
    itemsize, shape = DTYPES[config.dtype].itemsize, config.shape(seq_len)
    heads = config.compared_heads()
    rows = []
    for variant in config.variants():
        timing = timings[variant.name]
        plain = timings.get(Variant(variant.vc_dim).name)
        alike = timings.get(with_heads(variant, heads), timing)
        softmax = timings.get(SOFTMAX)
        rows.append(
            AttentionRow(
                seq_len, variant.name, variant.vc_dim, variant.gated, variant.window_step,
                config.heads, variant.mask(seq_len, config.chunk_size).geometry.field_size,
                timing=timing,
                ratio_to_d1=timing.ratio_to(timings[Variant(1, variant.gated).name]),
                ratio_to_plain=None if plain is None else timing.ratio_to(plain),
                softmax_ratio=None if softmax is None else softmax.ratio_to(alike),
                io_bytes=shape.io_numbers(config.backward) * itemsize,
                peak_extra_bytes=peaks.get(variant.name),
                bound_bytes=shape.bound_words(variant.vc_dim, config.chunk_size) * itemsize,
            )
        )  # fmt: skip
    if SOFTMAX in timings:
        same = Shape(seq_len, heads, config.key_dim, config.value_dim, config.batch)
        io_bytes = same.io_numbers(config.backward) * itemsize
        d1 = timings.get(with_heads(Variant(1, config.gates[0]), heads))
        d1 = timings[Variant(1, config.gates[0]).name] if d1 is None else d1
        rows.append(
            AttentionRow(
                seq_len, SOFTMAX, None, False, None, heads, None, timings[SOFTMAX],
                timings[SOFTMAX].ratio_to(d1), None, 1.0, io_bytes, None, None,
            )
        )  # fmt: skip
    return rows


def fit_growth(rows: Sequence[AttentionRow]) -> dict[str, float]:
    """Fit the exponent of the time in the length, for every variant with two lengths or more."""
    fits = {}
    for name in dict.fromkeys(row.name for row in rows):
        same = [row for row in rows if row.name == name]
        exponent = growth_exponent(
            [row.seq_len for row in same], [row.timing.median for row in same]
        )
        if exponent is not None:
            fits[name] = exponent
    return fits


def rates(config: AttentionConfig, seq_len: int, timings: Mapping[str, Timing]) -> dict[str, Any]:
    """GFLOP/s of the matrix product and, when only the forward is timed, of the causal branch."""
    product = 2.0 * config.gemm_size**3 / timings[GEMM].median / 1e9
    found: dict[str, Any] = {"seq_len": seq_len, "gemm": product}
    if CAUSAL in timings:
        flops = config.shape(seq_len).causal_flops
        found["causal_branch"] = flops / timings[CAUSAL].median / 1e9
        found["fraction_of_gemm"] = found["causal_branch"] / product
        if Variant(1).name in timings:
            whole = flops / timings[Variant(1).name].median / 1e9
            found["whole_op_fraction_of_gemm"] = whole / product
    return found
