"""Time one token of decoding against the length of the context, beside softmax with a KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import cycle, product
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import smat
from smat.bench import measure
from smat.bench.attention import SOFTMAX, Variant, draw_inputs
from smat.bench.config import DecodeConfig
from smat.bench.measure import DTYPES, Call, Reading

CHECK_LEN = 149
STEPS_PER_TURN = 16
NUM_TOKENS = 32  # different tokens that are fed in turn
EXTENDED_AT_ONCE = 4096
Token = tuple[Tensor, Tensor, Tensor]  # q, k, v, of one token or of several


@dataclass(frozen=True)
class Decoder:
    """Something that decodes one token at a time: a state of some schedule and d, or softmax."""

    config: DecodeConfig
    kind: str  # "fixed", "window" or "softmax"
    vc_dim: int | None
    context: int
    batch: int

    @property
    def name(self) -> str:
        """What tables and figures call it, whatever the context and the batch."""
        return f"d={self.vc_dim}{' window' * (self.kind == 'window')}" if self.vc_dim else SOFTMAX

    @property
    def window_step(self) -> int | None:
        """The step of a window: the paper's quarter of the horizon, unless it was given."""
        default = max(1, self.context // 4)
        return (self.config.window_step or default) if self.kind == "window" else None

    @property
    def num_steps(self) -> int:
        """How many steps to take in one pass; a window's go around a move of its boundary."""
        if self.window_step is None:
            return self.config.steps
        return max(1, min(self.config.window_steps, 2 * self.window_step, self.context))

    @cached_property
    def mask(self) -> smat.SMatMask:
        """The mask; a fixed boundary has its horizon at the end of the steps."""
        horizon = self.context + (0 if self.window_step else self.num_steps)
        return Variant(self.vc_dim, False, self.window_step).mask(horizon, self.config.chunk_size)

    @property
    def expected_bytes(self) -> int:
        """Estimate what the decoder keeps: B + 1 states, keys and values, or a window's tables.

        A window keeps two type tables (one in the making), two profile tables and two running
        states. A batch is copied from one sequence.
        """
        config, itemsize = self.config, DTYPES[self.config.dtype].itemsize
        if self.vc_dim is None:
            tokens = self.batch * config.heads * (self.context + config.steps)
            return tokens * (config.key_dim + config.value_dim) * itemsize
        states = self.mask.geometry.num_types + 1
        if self.window_step:
            states = 2 * (states + self.mask.geometry.num_profiles)
        numbers = (self.batch + 1) * config.heads * config.key_dim * (config.value_dim + 1)
        return states * numbers * itemsize

    def fill_state(self) -> smat.SMatState:
        """Take in random keys and values, the same for all sequences of the batch.

        A window's boundary moves in the middle of the steps: it is prefilled up to a segment's
        beginning and then extended, so that its next type table is as far built as it is while
        decoding.
        """
        length, added = self.context, 0
        if self.window_step is not None:
            length = (max(2, self.context // self.window_step) - 1) * self.window_step
            added = max(0, self.window_step - self.num_steps // 2)
        prompt = draw_tokens(self.config, length, seed=3)
        last = torch.tensor([length - 1], device=self.config.device)
        _, state = smat.smat_attention(*prompt, self.mask, positions=last, output_final_state=True)
        assert state is not None
        for start in range(0, added, EXTENDED_AT_ONCE):
            some = draw_tokens(self.config, min(EXTENDED_AT_ONCE, added - start), seed=4 + start)
            _, state = state.extend(*some, inplace=True)
        return state if self.batch == 1 else state.repeat_interleave(self.batch)

    def stepper(self) -> tuple[Call, int]:
        """A step that feeds random tokens for ever, at the end of the context; its bytes."""
        tokens = cycle(token_by_token(*draw_tokens(self.config, NUM_TOKENS, self.batch, seed=2)))
        if self.vc_dim is None:
            return self._softmax_stepper(tokens)
        state = self.fill_state()

        def step() -> Tensor:
            nonlocal state
            out, state = state.step(*next(tokens), inplace=True)
            return out

        return step, state.num_bytes

    def _softmax_stepper(self, tokens: Iterator[Token]) -> tuple[Call, int]:
        """Softmax attention with keys and values preallocated to the last token."""
        config, last = self.config, self.context + self.config.steps
        options: dict[str, Any] = {"device": config.device, "dtype": DTYPES[config.dtype]}
        keys, values = (  # made in place: nothing beside them needs memory
            torch.empty(self.batch, config.heads, last, width, **options).normal_()
            for width in (config.key_dim, config.value_dim)
        )
        places = iter(range(self.context, last))

        def step() -> Tensor:
            place, (q, k, v) = next(places), next(tokens)
            keys[:, :, place], values[:, :, place] = k, v
            seen = keys[:, :, : place + 1], values[:, :, : place + 1]
            return F.scaled_dot_product_attention(q.unsqueeze(2), *seen)

        return step, keys.nbytes + values.nbytes


def draw_tokens(config: DecodeConfig, length: int, batch: int = 1, *, seed: int) -> Token:
    """Draw queries, keys and values of some tokens."""
    inputs = draw_inputs(config, length, batch, config.heads, seed=seed)
    return inputs["q"], inputs["k"], inputs["v"]


def token_by_token(q: Tensor, k: Tensor, v: Tensor) -> list[Token]:
    """Take queries, keys and values apart along the tokens."""
    return list(zip(q.unbind(1), k.unbind(1), v.unbind(1), strict=True))


def plan_packs(
    config: DecodeConfig, limit: float
) -> tuple[list[list[Decoder]], list[dict[str, Any]]]:
    """Pack decoders that are timed in turns: as many as fit, each beside its shortest context."""
    packs: list[list[Decoder]] = []
    skipped: list[dict[str, Any]] = []
    kinds: list[tuple[str, int | None]] = [
        (schedule, vc_dim)
        for schedule, vc_dim in product(config.schedules, config.vc_dims)
        if schedule == "fixed" or vc_dim > 1  # d = 1 once
    ]
    kinds += [(SOFTMAX, None)] if config.softmax else []
    for batch, context in product(config.batches, sorted(set(config.contexts))):
        free = 0.0  # every batch and context begins a pack
        for kind, vc_dim in kinds:
            decoder = Decoder(config, kind, vc_dim, context, batch)
            shortest = replace(decoder, context=min(config.contexts))
            members = [decoder] if decoder == shortest else [shortest, decoder]
            need = sum(member.expected_bytes for member in members)
            if need > limit:
                where = {"name": decoder.name, "batch": batch, "context": context}
                skipped.append({**where, "bytes": need})
                continue
            if need > free:
                packs.append([])
                free = limit
            packs[-1] += members
            free -= need
    return packs, skipped


def run_decode(config: DecodeConfig) -> dict[str, Any]:
    """Check every decoder, time all contexts, and return the record."""
    device = measure.find_device(config.device, config.dtype)
    limit = config.max_gb and int(config.max_gb * 1e9)
    if limit is None and device.type == "cpu":
        with suppress(OSError):
            limit = int(0.7 * measure.read_bytes("/proc/meminfo", "MemAvailable"))
    if limit is None and device.type == "cuda":
        limit = int(0.7 * torch.cuda.mem_get_info(device)[0])
    plan, skipped = plan_packs(config, float("inf") if limit is None else limit)
    kinds = {decoder.name: decoder for pack in plan for decoder in pack if decoder.vc_dim}
    checks = [check for decoder in kinds.values() for check in check_decoder(decoder)]
    record = measure.begin_record("decode", config, device, checks)
    rows = []
    for number, pack in enumerate(plan, start=1):
        rows += _time(pack, device, f"decode, {number} of {len(plan)}")
    softmax = {(row["batch"], row["context"]): row for row in rows if row["kind"] == SOFTMAX}
    for row in rows:
        beside = softmax.get((row["batch"], row["context"]))
        if beside is not None:
            row["softmax_ratio"] = beside["timing"]["median"] / row["timing"]["median"]
    return {**record, "memory_limit": limit, "rows": rows, "skipped": skipped}


def check_decoder(decoder: Decoder) -> list[dict[str, Any]]:
    """Prefill a third, decode the rest, and compare every output with the oracle in fp64."""
    config, split = decoder.config, CHECK_LEN // 3
    step = CHECK_LEN // 8 if decoder.window_step else None
    mask = Variant(decoder.vc_dim, False, step).mask(CHECK_LEN, min(config.chunk_size, 16))
    q, k, v = draw_tokens(config, CHECK_LEN, batch=2, seed=1)
    prompt = q[:, :split], k[:, :split], v[:, :split]
    out, state = smat.smat_attention(*prompt, mask, output_final_state=True)
    assert state is not None
    outputs = [out]
    for token in token_by_token(q, k, v)[split:]:
        out_t, state = state.step(*token, inplace=True)
        outputs.append(out_t.unsqueeze(1))
    oracle = {"output": smat.reference_attention(q.double(), k.double(), v.double(), mask)}
    found = {"output": torch.cat(outputs, dim=1)}
    size = f"T = {CHECK_LEN}, decoded from {split}"
    return measure.check(decoder.name, size, found, oracle, config.dtype)


def _time(pack: list[Decoder], device: torch.device, what: str) -> list[dict[str, Any]]:
    config, windows = pack[0].config, [member for member in pack if member.window_step]
    passes: list[dict[Decoder, list[Reading]]] = []
    num_bytes: dict[Decoder, int] = {}
    # Later passes are for the slowest step of a window alone.
    for members in [pack, *[windows] * (config.passes - 1 if windows else 0)]:
        calls: dict[Decoder, tuple[Call, int]] = {}
        for member in members:
            step, num_bytes[member] = member.stepper()
            calls[member] = step, member.num_steps - 1 or 1
        passes.append(measure.read_in_turns(calls, STEPS_PER_TURN, config.budget, device, what))
        del calls, step  # and their states, before the next pass makes its own
    timings = {member: measure.sum_up(readings) for member, readings in passes[0].items()}
    rows = []
    for member, timing in timings.items():
        beside = replace(member, context=min(config.contexts))
        if member == beside and any(other.context > member.context for other in pack):
            continue  # here for the ratio alone: it has a row from a pack of its own
        slowest = None
        if member.window_step:
            # A step counts with its fastest pass: what the algorithm does at a step it does in
            # every pass, what the system does in between it does not.
            walks = zip(*(taken[member] for taken in passes), strict=False)
            steps = [min(same).seconds for same in walks]
            slowest = max(steps) / median(steps)
        row = {
            "name": member.name,
            "kind": member.kind,
            "vc_dim": member.vc_dim,
            "batch": member.batch,
            "context": member.context,
            "window_step": member.window_step,
            "cache_bytes": num_bytes[member],
            "timing": timing._asdict(),
            "ratio_to_shortest": timing.ratio_to(timings[beside]),
            "softmax_ratio": None,
            "slowest_to_median": slowest,
        }
        rows.append(row)
    return rows
