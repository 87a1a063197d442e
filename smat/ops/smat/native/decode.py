"""Decoding on a CPU: one call a token, whose description is kept from token to token.

A token that looks like the one before it, in shapes, strides and dtypes, needs no checks but those
of its values, which the kernel makes: `Stepper.repeat`. Everything else goes through `step_token`.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smat.ops.feature_maps import POINTWISE
from smat.ops.linear.decay import decay_factor
from smat.ops.native.arguments import num_threads
from smat.ops.native.build import load
from smat.ops.smat import arguments as check
from smat.ops.smat import step as in_torch
from smat.ops.smat.cohorts import Cohort
from smat.ops.smat.fold import lambda_at
from smat.ops.smat.routing import Gates, Inputs, Routing
from smat.ops.smat.state import StateTables

SOURCE = "smat/native/step.cpp"
TOKEN = ("q", "k", "v", *Gates._fields, *Routing._fields)
TABLES = (
    "recent", "profile_table", "type_table", "log_decay", "edge_log_decay", "profile_log_decay",
)  # fmt: skip
WRITTEN = {"recent", "profile_table", "log_decay", "profile_log_decay"}
NUMBERS = (
    "batch", "heads", "query_heads", "q_heads", "k_heads", "v_heads", "log_decay_heads",
    "key_gate_heads", "profile_heads", "write_weight_heads", "reads", "slots", "key_dim",
    "value_dim", "num_profiles", "num_types", "first_type", "map", "normalize", "local",
    "num_threads", "q_row", "k_row", "v_row",
)  # fmt: skip
INTEGERS = {"profile", "query_type"}
Token = Sequence[Tensor | None]  # (B, heads, ...), in the order of TOKEN


class Step(ctypes.Structure):
    """The arguments of a step, in the order of `step.cpp`; addresses are numbers."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (*TOKEN, *(f"table_{name}" for name in TABLES), "place", "out", *NUMBERS)
    )


class Slab(ctypes.Structure):
    """The arguments of a fold, in the order of `step.cpp`."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in (
            "delta", "types", "old", "left", "between", "rows", "work", "num_rows", "stride",
            "columns", "state_size", "field_size", "ambient_dim", "type_stride",
        )
    )  # fmt: skip


class Stepper:
    """The steps of one state: where its memory and its rows are, and how the last token looked."""

    def __init__(self, state: StateTables, library: ctypes.CDLL) -> None:
        spec, kind = state.spec, str(state.dtype).removeprefix("torch.")
        self.owner = id(state)  # a fork has the same stepper, and makes its own
        self.step, self.fold, self.count_work = (
            getattr(library, f"{name}_{kind}") for name in ("step", "fold", "slab_work")
        )
        self.step.argtypes = [ctypes.c_void_p]
        self.tables: list[Tensor | None] = [None] * len(TABLES)
        self.place = (ctypes.c_int64 * max(1, 4 * len(state)))()
        self.rows: list[Any] = []  # where the rows stand, as ``place`` has it
        self.looks: list[Any] | None = None  # how a token looks that needs no checks
        self.until = 0  # the position before which nothing is to be said of the horizon
        size = spec.feature_dim * spec.aug_dim
        self.call = Step(
            place=ctypes.addressof(self.place), batch=len(state), heads=spec.heads,
            query_heads=spec.query_heads, slots=state.num_slots, key_dim=spec.feature_dim,
            value_dim=spec.value_dim, num_profiles=state.num_profiles, num_types=state.num_types,
            first_type=1 - state.anchor, map=POINTWISE.index(state.pointwise),
            normalize=spec.normalize, local=spec.branch != "long_range",
            num_threads=num_threads(4 * len(state) * spec.query_heads * size),
        )  # fmt: skip
        self.address = ctypes.addressof(self.call)
        self.shape = (len(state), spec.query_heads, spec.value_dim)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # addresses mean nothing in a copy

    def describe(self, token: Token) -> None:
        """Say how many heads and reads the tensors of a token have, and where rows begin."""
        for name, x in zip(TOKEN, token, strict=True):
            if x is not None and f"{name}_heads" in NUMBERS:
                setattr(self.call, f"{name}_heads", x.shape[1])
            if x is not None and f"{name}_row" in NUMBERS:
                setattr(self.call, f"{name}_row", x.stride(0))
        types = token[TOKEN.index("query_type")]
        self.call.reads = 1 if types is None or types.ndim == 2 else types.shape[2]

    def launch(self, state: StateTables, token: Token) -> Tensor | None:
        """Take in a token that fits, and answer its queries, (B, Hq, V); None if values do not."""
        call = self.call
        for at, name in enumerate(TABLES):
            table = state.tensors.get(name)
            if table is not self.tables[at]:
                self.tables[at] = table
                setattr(call, f"table_{name}", 0 if table is None else table.data_ptr())
        rows = [(x.rows, x.position, x.is_folded, x.newest, x.segment) for x in state.cohorts]
        if rows != self.rows:
            self._write_place(state)
        for name, x in zip(TOKEN, token, strict=True):
            setattr(call, name, 0 if x is None else x.data_ptr())
        out = torch.empty(self.shape, dtype=state.dtype)
        call.out = out.data_ptr()
        if self.step(self.address):
            self.rows = rows
            return None
        self.rows = [(row[0], row[1] + 1, *row[2:]) for row in rows]
        return out

    def _write_place(self, state: StateTables) -> None:
        for each in state.cohorts:
            place: list[ctypes.c_int64 | int] = [
                each.position,
                each.newest % state.num_slots if each.is_folded else -1,
                each.segment % state.num_slots,
                each.segment % state.num_buffers if state.has_tables and each.segment else -1,
            ]
            for row in each.rows:
                self.place[4 * row : 4 * row + 4] = place

    def repeat(self, state: StateTables, token: Token, spread: bool) -> Tensor | None:
        """Take in a token that looks like the last one; None if it must be looked at closely."""
        if self.looks is None or self.owner != id(state) or not state._shared.isdisjoint(WRITTEN):
            return None
        for cohort in state.cohorts:
            if cohort.position >= cohort.quiet_until or cohort.position >= self.until:
                return None
        for x, look in zip(token, self.looks, strict=True):
            if x is None or look is None:
                if x is not look:
                    return None
            elif (
                type(x) is not Tensor
                or x.shape != look[0]
                or x.dtype is not look[1]
                or x.stride() != look[2]
                or not x.is_cpu
            ):
                return None
        if token[3] is not None:
            token = (*token[:3], token[3].double(), *token[4:])
        out = self.launch(state, token)
        if out is not None:
            in_torch.count_token(state, spread)
        return out

    def remember(self, state: StateTables, token: Token, given: Token) -> None:
        """Note how a token looks if the kernel took it as it was given, but for the gates."""
        gate = given[3]
        pairs = zip(TOKEN, token, given, strict=True)
        own = all(x is y for name, x, y in pairs if name != "log_decay")
        self.looks = None
        if own and state.map_before is None and (gate is None or gate.is_contiguous()):
            self.looks = [None if x is None else (x.shape, x.dtype, x.stride()) for x in given]
        mask, last = state.mask, max((each.position for each in state.cohorts), default=0)
        endless = mask.boundary.horizon_free or mask.vc_dim == 1 or last > mask.seq_len
        self.until = sys.maxsize if endless else mask.seq_len

    def fold_slab(
        self, state: StateTables, cohort: Cohort, segment: int, head: int, columns: slice
    ) -> None:
        """Fold some columns of a head's profile table into its type table."""
        slot = (segment - 1) % state.num_slots
        delta, types = state.own("profile_table"), state.own("type_table")
        left = between = None
        if "profile_log_decay" in state.tensors:
            edge = lambda_at(state, cohort, segment)[:, head]
            last = cohort.pick(state.tensors["profile_log_decay"][slot])[:, head]
            left = decay_factor((edge[:, None] - last).sum(-1), state.dtype).contiguous()
            earlier = lambda_at(state, cohort, segment - 1)[:, head]
            between = decay_factor((edge - earlier).sum(-1), state.dtype).contiguous()
        rows = (ctypes.c_int64 * len(cohort.rows))(*cohort.rows)
        geometry, size = state.mask.geometry, state.spec.feature_dim * state.spec.aug_dim
        buffers = [
            types[each % len(types), :, head].flatten(-2)[..., columns]
            for each in (segment, segment - 1)
        ]
        part = delta[slot, :, head].flatten(-2)[..., columns]
        slab = Slab(
            delta=part.data_ptr(), types=buffers[0].data_ptr(),
            old=buffers[1].data_ptr() if segment > 1 else 0,
            left=0 if left is None else left.data_ptr(),
            between=0 if between is None else between.data_ptr(),
            rows=ctypes.addressof(rows), num_rows=len(rows), stride=delta.stride(1),
            columns=part.shape[-1], state_size=size, field_size=geometry.field_size,
            ambient_dim=geometry.ambient_dim, type_stride=types.stride(1),
        )  # fmt: skip
        work = torch.empty(self.count_work(ctypes.byref(slab)), dtype=state.dtype)
        slab.work = work.data_ptr()
        self.fold(ctypes.byref(slab))


def stepper_of(state: StateTables) -> Stepper | None:
    """Find the stepper of a state, or make it; None if there are no kernels."""
    if not isinstance(state.numbers, Stepper) or state.numbers.owner != id(state):
        library = load(SOURCE)
        state.numbers = None if library is None else Stepper(state, library)
    return state.numbers


def step_token(state: StateTables, inputs: Inputs, spread: bool) -> Tensor:
    """Take in one token, (B, 1, heads, .), and answer its queries, (B, Hq, V)."""
    q, k, v, gates, routing = inputs[:5]
    stepper = stepper_of(state)
    if stepper is None:
        return in_torch.step_token(state, inputs, spread)
    check.check_new_tokens(state, q, k, v, gates, routing)
    token = [
        None if x is None else x[:, 0]
        for x in (
            in_torch.map_before(state, "q", q), in_torch.map_before(state, "k", k), v, *gates,
            *routing,
        )
    ]  # fmt: skip
    in_torch.meet_events(state)
    if gates.log_decay is not None:
        in_torch.allocate_gates(state)
    for name in WRITTEN & state.tensors.keys():
        state.own(name)
    fitting = [
        None if x is None else _fitting(name, x, state.dtype)
        for name, x in zip(TOKEN, token, strict=True)
    ]
    stepper.describe(fitting)
    out = stepper.launch(state, fitting)
    assert out is not None, "values were checked"
    in_torch.count_token(state, spread)
    stepper.remember(state, fitting, token)
    return out


def _fitting(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor of a token; those of q, k and v may have gaps between batch rows."""
    if name in INTEGERS:
        return x.long().contiguous()
    x = x.to(torch.float64 if name == "log_decay" else dtype)
    if name in "qkv" and x.stride()[1:] == (x.shape[2], 1):
        return x
    return x.contiguous()
