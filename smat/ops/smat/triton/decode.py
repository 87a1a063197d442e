"""Decoding with the fused step: what stands on the device, and what the host does between tokens.

A launch reads from device memory where each row stands, and moves it on by itself. The host counts
along, and writes these numbers anew only where an event changes them: no token waits for the
device, and a launch can be captured in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from smat.ops.feature_maps import repeat_heads
from smat.ops.smat import arguments as check
from smat.ops.smat.routing import NO_GATES, POSITIONAL, Gates, Inputs, Routing
from smat.ops.smat.state import StateTables, isolated
from smat.ops.smat.step import (
    allocate_gates,
    count_token,
    map_before,
    meet_events,
    tables_decay,
)
from smat.ops.smat.triton.step import step_kernel
from smat.ops.triton.launch import launch

TILE = 2048  # numbers that a program holds of a state at a time, for all queries of a group
WRITTEN = ("recent", "profile_table", "log_decay", "profile_log_decay")
# As the operator takes them.
TABLES = (
    "recent", "profile_table", "type_table", "log_decay", "edge_log_decay", "profile_log_decay",
)  # fmt: skip


class FusedStep:
    """The steps of one state with static memory, each one launch that a CUDA graph may capture.

        step = FusedStep(state)
        step.before_token()
        with torch.cuda.graph(graph):
            out = step.launch(q_t, k_t, v_t)
        for token in tokens:       # copied into q_t, k_t, v_t
            step.before_token()    # folds, where the boundary moves
            graph.replay()
            step.after_token()     # counts the token, and does its share of a fold

    Folds are launches of their own, outside the graph: at a move of the boundary, or with every
    token if the state spreads them (``fold="spread"``). Tables are allocated here, and stay;
    ``gated`` makes room for the gates of later tokens.
    """

    def __init__(self, state: StateTables, gated: bool = False) -> None:
        if state.dtype != torch.float32:
            raise ValueError(f"kernels take states in float32, got {state.dtype}")
        self.state, self.numbers = state, DeviceNumbers(state)
        if state.has_tables and state.schedule.num_segments != 1:
            state.allocate("type_table")
        if gated:
            allocate_gates(state)
        for name in list(state.tensors):
            state.own(name)
        self.tensors = dict(state.tensors)  # a graph goes on pointing to what a state gives up

    def before_token(self) -> None:
        """Let everything happen that happens before the next token."""
        meet_events(self.state)
        self.numbers.follow(self.state)

    @isolated
    def launch(
        self,
        q_t: Tensor,
        k_t: Tensor,
        v_t: Tensor,
        gates: Gates = NO_GATES,
        routing: Routing = POSITIONAL,
    ) -> Tensor:
        """Take in one token, (B, heads, .), and answer its queries, (B, Hq, V); unchecked."""
        state, has_room = self.state, "log_decay" in self.tensors
        if gates.log_decay is not None and not has_room and tables_decay(state):
            raise ValueError("log_decay has no room in this state: FusedStep(state, gated=True)")
        q_t, k_t = map_before(state, "q", q_t), map_before(state, "k", k_t)
        return _launch(
            state, self.tensors, Inputs(q_t, k_t, v_t, gates, routing), self.numbers.place
        )

    def after_token(self) -> None:
        """Count the token."""
        count_token(self.state, spread=self.state.num_buffers > 1)
        self.numbers.count()


class DeviceNumbers:
    """Where every row and head stands, on the device: (B, H, 4), as `step_kernel` reads it."""

    def __init__(self, state: StateTables) -> None:
        shape = (len(state), state.spec.heads, 4)
        self.place = torch.zeros(shape, dtype=torch.long, device=state.device)
        self.known: list[tuple[Any, ...]] = []  # what the device has

    def follow(self, state: StateTables) -> None:
        """Write what the device does not have: nothing, but after an event."""
        now = [
            (each.rows, each.position, each.is_folded, each.newest, each.segment)
            for each in state.cohorts
        ]
        if now == self.known:
            return
        for cohort in state.cohorts:
            slot = cohort.newest % state.num_slots if cohort.is_folded else -1
            reads = cohort.segment > 0 and state.has_tables
            buffer = cohort.segment % state.num_buffers if reads else -1
            numbers = cohort.position, slot, cohort.segment % state.num_slots, buffer
            for column, number in enumerate(numbers):
                part = self.place[..., column]
                if cohort.index is None:
                    part.fill_(number)
                else:
                    part.index_fill_(0, cohort.index, number)
        self.known = now

    def count(self) -> None:
        """Move on as a launch does."""
        self.known = [(rows, position + 1, *rest) for rows, position, *rest in self.known]


def step_token(state: StateTables, inputs: Inputs, spread: bool) -> Tensor:
    """Take in one token, (B, 1, heads, .), and answer its queries, (B, Hq, V)."""
    q, k, v, gates, routing, _ = inputs
    check.check_new_tokens(state, q, k, v, gates, routing)
    q, k = map_before(state, "q", q), map_before(state, "k", k)
    meet_events(state)
    if gates.log_decay is not None:
        allocate_gates(state)
    for name in WRITTEN:
        if name in state.tensors:
            state.own(name)
    if not isinstance(state.numbers, DeviceNumbers):
        state.numbers = DeviceNumbers(state)
    state.numbers.follow(state)
    token = Inputs(
        q[:, 0], k[:, 0], v[:, 0],
        Gates(*(None if x is None else x[:, 0] for x in gates)),
        Routing(*(None if x is None else x[:, 0] for x in routing)),
    )  # fmt: skip
    out = _launch(state, state.tensors, token, state.numbers.place)
    state.numbers.count()
    count_token(state, spread)
    return out


def _launch(state: StateTables, tensors: dict[str, Tensor], token: Inputs, place: Tensor) -> Tensor:
    """Hand the state's tensors and one token, (B, heads, .), to the operator."""
    spec, gates, routing = state.spec, token.gates, token.routing
    per_head = [
        None if x is None else repeat_heads(x.unsqueeze(1), spec.heads)[:, 0].contiguous()
        for x in (gates.log_decay, routing.write_weight, routing.profile)
    ]
    others = gates.key_gate, routing.query_type, routing.read_weight
    return fused_step(
        *(x if x.stride(-1) == 1 else x.contiguous() for x in token[:3]),
        *per_head,
        *(None if x is None else x.contiguous() for x in others),
        *(tensors.get(name) for name in TABLES), place,
        spec.query_heads, state.num_profiles, state.num_types, 1 - state.anchor,
        state.pointwise, spec.normalize, spec.branch != "long_range",
    )  # fmt: skip


@torch.library.custom_op(
    "smat::fused_step",
    mutates_args=("recent", "profile_table", "log_decay", "profile_log_decay", "place"),
)
def fused_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    write_weight: Tensor | None,
    profile: Tensor | None,
    key_gate: Tensor | None,
    query_type: Tensor | None,
    read_weight: Tensor | None,
    recent: Tensor,
    profile_table: Tensor | None,
    type_table: Tensor | None,
    log_decay: Tensor | None,
    edge_log_decay: Tensor | None,
    profile_log_decay: Tensor | None,
    place: Tensor,
    query_heads: int,
    num_profiles: int,
    num_types: int,
    first_type: int,
    feature_map: str,
    normalize: bool,
    local: bool,
) -> Tensor:
    """Take in one token, in place, and answer its queries, (B, Hq, V): one launch."""
    slots, batch, heads, feature_dim, aug_dim = recent.shape
    value_dim, group = aug_dim - normalize, query_heads // heads
    out = v.new_empty(batch, query_heads, value_dim)
    across, columns = triton.next_power_of_2(group), triton.next_power_of_2(value_dim)
    rows = min(triton.next_power_of_2(feature_dim), max(1, TILE // (across * columns)))
    launch(
        step_kernel, batch * heads, q, k, v, gate, key_gate, write_weight, profile, query_type,
        read_weight, recent, profile_table, type_table, log_decay, edge_log_decay,
        profile_log_decay, place, out, batch * heads, num_profiles, num_types, first_type,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        HEADS=heads, GROUP=group, Q_HEADS=q.shape[1], K_HEADS=k.shape[1], V_HEADS=v.shape[1],
        GATE_HEADS=1 if key_gate is None else key_gate.shape[1],
        READS=1 if query_type is None or query_type.ndim == 2 else query_type.shape[2],
        SLOTS=slots, K=feature_dim, V=value_dim, MAP=feature_map, NORMALIZE=normalize,
        LOCAL=local, BG=across, BK=rows, BV=columns,
    )  # fmt: skip
    return out


@fused_step.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return v.new_empty(len(v), rest[13], v.shape[-1])
