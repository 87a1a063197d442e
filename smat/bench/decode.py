"""Time one token of decoding against the length of the context, beside softmax with a KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

import smat
from smat.bench.checks import TOLERANCES, Check, relative_rms, require_passed
from smat.bench.decode_config import SOFTMAX, DecodeConfig, Decoder
from smat.bench.decode_steppers import make_stepper
from smat.bench.environment import describe_environment
from smat.bench.memory import available_bytes
from smat.bench.timing import (
    NoProgress,
    Progress,
    Samples,
    Timing,
    measure_steps,
    synchronizer,
)
from smat.bench.workload import DTYPES, Inputs, Shape, Variant, check_device

CHECK_LEN = 149
STEPS_PER_TURN = 16


@dataclass(frozen=True)
class DecodeRow:
    """One decoder at one context and batch; seconds a token."""

    name: str
    kind: str
    vc_dim: int | None
    batch: int
    context: int
    window_step: int | None
    cache_bytes: int
    timing: Timing
    ratio_to_shortest: float  # to the shortest context, timed in turns with it
    softmax_ratio: float | None  # how many times longer a token of softmax took
    slowest_to_median: float | None  # of a window: its slowest step, the same in every pass


def run_decode(config: DecodeConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Check every decoder, time all contexts, and return plain data."""
    progress = NoProgress() if progress is None else progress
    device = check_device(config.device, config.dtype)
    limit = _memory_limit(config)
    plan, skipped = plan_packs(config, limit)
    for pack in plan:
        progress.expect(sum(_num_timed(decoder, config) for decoder in pack))
    environment = describe_environment(device)
    kinds = {
        (decoder.kind, decoder.vc_dim): decoder
        for pack in plan
        for decoder in pack
        if decoder.kind != SOFTMAX
    }
    checks = [check_decoder(config, decoder) for decoder in kinds.values()]
    require_passed(checks)
    rows: list[DecodeRow] = []
    for pack in plan:
        rows += _time(config, pack, device, progress)
    return {
        "benchmark": "decode",
        "environment": environment,
        "config": asdict(config),
        "memory_limit": limit,
        "checks": [asdict(check) for check in checks],
        "rows": [asdict(row) for row in _with_softmax_ratio(rows)],
        "skipped": skipped,
    }


def plan_packs(
    config: DecodeConfig, limit: int | None
) -> tuple[list[list[Decoder]], list[dict[str, Any]]]:
    """Group decoders that are timed in turns: as many as fit, each beside its shortest context."""
    packs: list[list[Decoder]] = []
    skipped: list[dict[str, Any]] = []
    shortest = min(config.contexts)
    for batch in config.batches:
        for context in sorted(set(config.contexts)):
            pack: list[Decoder] = []
            used = 0
            for decoder in config.decoders(batch, context):
                members = list(dict.fromkeys([decoder.at(shortest), decoder]))
                need = sum(member.expected_bytes(config) for member in members)
                if limit is not None and need > limit:
                    skipped.append(
                        {"name": decoder.name, "batch": batch, "context": context, "bytes": need}
                    )
                    continue
                if limit is not None and used + need > limit:
                    packs.append(pack)
                    pack, used = [], 0
                pack += members
                used += need
            packs.append(pack)
    return [pack for pack in packs if pack], skipped


def check_decoder(config: DecodeConfig, decoder: Decoder) -> Check:
    """Prefill a third, decode the rest, and compare every output with the oracle in fp64."""
    dtype, device = DTYPES[config.dtype], torch.device(config.device)
    step = CHECK_LEN // 8 if decoder.kind == "window" else None
    mask = Variant(decoder.vc_dim, window_step=step).mask(CHECK_LEN, min(config.chunk_size, 16))
    shape = Shape(CHECK_LEN, min(2, config.heads), config.key_dim, config.value_dim, batch=2)
    inputs = Inputs.random(shape, dtype, device, backward=False, seed=1)
    q, k, v = inputs.q, inputs.k, inputs.v
    split = CHECK_LEN // 3
    out, state = smat.smat_attention(
        q[:, :split], k[:, :split], v[:, :split], mask, output_final_state=True
    )
    assert state is not None
    outputs = [out]
    for t in range(split, CHECK_LEN):
        out_t, state = state.step(q[:, t], k[:, t], v[:, t], inplace=True)
        outputs.append(out_t.unsqueeze(1))
    wide = inputs.to(torch.float64)
    oracle = smat.reference_attention(wide.q, wide.k, wide.v, mask)
    error = relative_rms(torch.cat(outputs, dim=1), oracle)
    size = f"T = {CHECK_LEN}, decoded from {split}"
    return Check(decoder.name, "output", size, error, TOLERANCES[dtype][0])


def _time(
    config: DecodeConfig, pack: Sequence[Decoder], device: torch.device, progress: Progress
) -> list[DecodeRow]:
    passes: list[dict[str, Samples]] = []
    num_bytes: dict[str, int] = {}
    for number in range(config.passes):
        # Later passes are for the slowest step of a window alone.
        taking_part = [member for member in pack if number == 0 or member.kind == "window"]
        if not taking_part:
            break
        steppers = {member.key: make_stepper(config, member, device) for member in taking_part}
        for stepper in steppers.values():
            stepper.step()  # warms up
        timed = {
            member.key: (steppers[member.key].step, member.num_steps(config) - 1 or 1)
            for member in taking_part
        }
        passes.append(
            measure_steps(timed, STEPS_PER_TURN, config.budget, progress, synchronizer(device))
        )
        num_bytes |= {key: stepper.num_bytes for key, stepper in steppers.items()}
        del steppers, timed
    timings = {key: samples.timing() for key, samples in passes[0].items()}
    shortest = min(config.contexts)
    return [
        DecodeRow(
            member.name, member.kind, member.vc_dim or None, member.batch, member.context,
            member.window_step(config) if member.kind == "window" else None,
            cache_bytes=num_bytes[member.key],
            timing=timings[member.key],
            ratio_to_shortest=timings[member.key].ratio_to(timings[member.at(shortest).key]),
            softmax_ratio=None,
            slowest_to_median=_slowest(member, passes),
        )
        for member in pack
        if member.context > shortest or all(other.context == shortest for other in pack)
    ]  # fmt: skip


def _slowest(member: Decoder, passes: Sequence[dict[str, Samples]]) -> float | None:
    """The slowest step of a window relative to its median step.

    A step counts with its fastest pass: what the algorithm does at a step it does in every pass,
    what the system does in between it does not.
    """
    if member.kind != "window":
        return None
    walks = [samples[member.key].seconds for samples in passes if member.key in samples]
    steps = [min(same) for same in zip(*walks, strict=False)]
    return max(steps) / median(steps)


def _with_softmax_ratio(rows: Sequence[DecodeRow]) -> list[DecodeRow]:
    softmax = {(row.batch, row.context): row.timing for row in rows if row.kind == SOFTMAX}

    def ratio(row: DecodeRow) -> float | None:
        beside = softmax.get((row.batch, row.context))
        return None if beside is None else beside.ratio_to(row.timing)

    return [DecodeRow(**{**vars(row), "softmax_ratio": ratio(row)}) for row in rows]


def _num_timed(decoder: Decoder, config: DecodeConfig) -> int:
    passes = config.passes if decoder.kind == "window" else 1
    return passes * max(1, decoder.num_steps(config) - 1)


def _memory_limit(config: DecodeConfig) -> int | None:
    if config.max_bytes is not None:
        return config.max_bytes
    free = available_bytes()
    if free is None or torch.device(config.device).type != "cpu":
        return None
    return int(0.7 * free)
