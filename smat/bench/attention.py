"""Time the op, forward (prefill) or forward and backward (train), beside softmax and d = 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from smat.bench.attention_config import (
    CAUSAL,
    GEMM,
    SOFTMAX,
    AttentionConfig,
    expected_costs,
    with_heads,
)
from smat.bench.attention_rows import attention_rows, fit_growth, rates
from smat.bench.checks import TOLERANCES, Check, relative_rms, require_passed
from smat.bench.environment import describe_environment
from smat.bench.memory import Workload, peak_extra_bytes
from smat.bench.timing import Candidate, NoProgress, Progress, Timing, gemm, measure, synchronizer
from smat.bench.workload import (
    DTYPES,
    Inputs,
    Shape,
    Variant,
    attend,
    attend_densely,
    causal_branch,
    check_device,
    softmax_attention,
)

CHECK_CHUNK = 64


def run_attention(config: AttentionConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Check every variant, time all lengths, measure memory; return plain data."""
    progress = NoProgress() if progress is None else progress
    device = check_device(config.device, config.dtype)
    for seq_len in config.seq_lens:
        costs = expected_costs(config, seq_len)
        progress.expect(sum(costs.values()) * (config.repeats + 1))
        if config.memory:
            progress.expect(sum(costs[variant.name] for variant in config.variants()))
    environment = describe_environment(device)
    checks = [check for variant in config.variants() for check in check_variant(config, variant)]
    require_passed(checks)
    # Memory first: what goes wrong there goes wrong before the long part.
    peaks = {seq_len: _peaks(config, seq_len, progress) for seq_len in config.seq_lens}
    timings = _time(config, progress)
    rows = [
        row
        for seq_len in config.seq_lens
        for row in attention_rows(config, seq_len, timings[seq_len], peaks[seq_len])
    ]
    return {
        "benchmark": "train" if config.backward else "prefill",
        "environment": environment,
        "config": asdict(config),
        "checks": [asdict(check) for check in checks],
        "rows": [asdict(row) for row in rows],
        "growth": fit_growth(rows),
        "rates": [rates(config, seq_len, timings[seq_len]) for seq_len in config.seq_lens],
    }


def check_variant(config: AttentionConfig, variant: Variant) -> list[Check]:
    """Compare output and gradients with the oracle in fp64, at a length that it can afford."""
    chunk_size = min(config.chunk_size, CHECK_CHUNK)
    seq_len = 8 * chunk_size - 3  # not a multiple of the chunk
    dtype, device = DTYPES[config.dtype], torch.device(config.device)
    shape = Shape(seq_len, min(2, config.heads), config.key_dim, config.value_dim)
    step = None if variant.window_step is None else max(1, seq_len // 6)
    checked = Variant(variant.vc_dim, variant.gated, step)
    inputs = Inputs.random(shape, dtype, device, config.backward, seed=1)
    mask = checked.mask(seq_len, chunk_size)
    found = attend(checked, inputs, mask, config.backward)
    oracle = attend_densely(checked, inputs.to(torch.float64), mask, config.backward)
    gradients = [f"gradient of {name}" for name in inputs.leaves(variant.gated)]
    names = ["output", *gradients][: len(found)]
    for_output, for_gradient = TOLERANCES[dtype]
    return [
        Check(
            variant.name,
            name,
            f"T = {seq_len}",
            relative_rms(value, right),
            for_output if name == "output" else for_gradient,
        )
        for name, value, right in zip(names, found, oracle, strict=True)
    ]


def attention_workload(
    backward: bool,
    vc_dim: int,
    gated: bool,
    window_step: int | None,
    chunk_size: int,
    dtype: str,
    device: str,
    **sizes: int,
) -> Workload:
    """Inputs of one variant, made and touched, and what to run on them."""
    variant, shape = Variant(vc_dim, gated, window_step), Shape(**sizes)
    place = torch.device(device)
    inputs = Inputs.random(shape, DTYPES[dtype], place, backward)
    mask = variant.mask(shape.seq_len, chunk_size)
    few = Shape(min(256, shape.seq_len), 1, shape.key_dim, shape.value_dim)
    small = Inputs.random(few, DTYPES[dtype], place, backward)
    gate_numbers = shape.batch * shape.seq_len * shape.heads if gated and backward else 0
    return Workload(
        run=lambda: attend(variant, inputs, mask, backward),
        output_bytes=(shape.output_numbers(backward) + gate_numbers) * DTYPES[dtype].itemsize,
        warm=lambda: attend(variant, small, variant.mask(few.seq_len, 16), backward),
        device=place,
    )


def _time(config: AttentionConfig, progress: Progress) -> dict[int, dict[str, Timing]]:
    """Time all lengths in turns with each other, since a growth exponent is a ratio too."""
    candidates = {
        f"{name} at {seq_len}": candidate
        for seq_len in config.seq_lens
        for name, candidate in _candidates(config, seq_len).items()
    }
    synchronize = synchronizer(torch.device(config.device))
    timings = measure(candidates, config.repeats, config.budget, progress, synchronize)
    return {
        seq_len: {name: timings[f"{name} at {seq_len}"] for name in expected_costs(config, seq_len)}
        for seq_len in config.seq_lens
    }


def _candidates(config: AttentionConfig, seq_len: int) -> dict[str, Candidate]:
    device, shape = torch.device(config.device), config.shape(seq_len)
    inputs = Inputs.random(shape, DTYPES[config.dtype], device, config.backward)
    runs: dict[str, Callable[[], object]] = {}

    def add_op(name: str, variant: Variant, given: Inputs) -> None:
        mask = variant.mask(seq_len, config.chunk_size)
        runs[name] = lambda: attend(variant, given, mask, config.backward)

    for variant in config.variants():
        add_op(variant.name, variant, inputs)
    if config.compares(seq_len):
        heads = config.compared_heads()
        runs[SOFTMAX] = softmax_attention(inputs, heads, config.backward)
        if heads != config.heads:
            fewer = Shape(seq_len, heads, config.key_dim, config.value_dim, config.batch)
            few = Inputs.random(fewer, DTYPES[config.dtype], device, config.backward)
            for variant in config.variants():
                add_op(with_heads(variant, heads), variant, few)
    if not config.backward:
        runs[CAUSAL] = causal_branch(inputs)
    runs[GEMM] = gemm(device, config.gemm_size)
    costs = expected_costs(config, seq_len)
    return {name: Candidate(run, costs[name]) for name, run in runs.items()}


def _peaks(config: AttentionConfig, seq_len: int, progress: Progress) -> dict[str, int]:
    """Measure the peak memory of every variant, each in a process of its own."""
    if not config.memory:
        return {}
    peaks, costs = {}, expected_costs(config, seq_len)
    for variant in config.variants():
        arguments = {
            "backward": config.backward, **asdict(variant), "chunk_size": config.chunk_size,
            "dtype": config.dtype, "device": config.device, **asdict(config.shape(seq_len)),
        }  # fmt: skip
        peaks[variant.name] = peak_extra_bytes(f"{__name__}:attention_workload", arguments)
        progress.done(costs[variant.name], f"memory of {variant.name}")
    return peaks
