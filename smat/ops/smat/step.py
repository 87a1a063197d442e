"""New tokens for a state, and one of them: events, write, read (Algorithm 3, lines 3-9).

An entry is one r x p state of ``profile_table`` or ``type_table``, numbered over slots (or
buffers), batch rows, heads and profiles (or types). Numbers let rows at different positions, and
tokens with profiles or types of their own, be served by one gather or scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.ops.feature_maps import inverse_or_zero, pointwise, repeat_heads
from smat.ops.linear.decay import FORGETS, decay_factor
from smat.ops.smat import arguments as check
from smat.ops.smat.cohorts import Cohort
from smat.ops.smat.fold import enter, spread_fold
from smat.ops.smat.routing import Gates, Inputs, Routing
from smat.ops.smat.state import StateTables

READ_ELEMENTS = 1 << 22  # of the index that some reads need at a time


class Tokens(NamedTuple):
    """Tokens (B, T, heads, ...): features, augmented values, gates and routing."""

    phi: Tensor | None  # absent where nothing is read
    psi: Tensor
    far: Tensor  # what goes to the profile table
    v: Tensor
    log_decay: Tensor | None = None  # fp64, clamped
    profile: Tensor | None = None
    query_type: Tensor | None = None  # (B, T, Hq), or (B, T, Hq, k)
    read_weight: Tensor | None = None

    def each(self, take: Callable[[Tensor], Tensor]) -> Tokens:
        """Take the same part of everything."""
        return Tokens(*(None if x is None else take(x) for x in self))  # type: ignore[arg-type]


def load_tokens(
    state: StateTables,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    routing: Routing,
    mapped: bool = False,
) -> Tokens:
    """Check new tokens (B, T, heads, .) and turn them into features and augmented values.

    Without q they are those of a prompt, which the op has checked. ``mapped`` says that k already
    went through a feature map that is not pointwise.
    """
    spec = state.spec
    if q is not None:
        check.check_new_tokens(state, q, k, v, gates, routing)
    phi = None if q is None else _features(state, "q", q, spec.query_heads)
    psi = _features(state, "k", k, spec.heads, mapped)
    v = repeat_heads(v.to(state.dtype), spec.heads)
    if spec.normalize:
        v = F.pad(v, (0, 1), value=1.0)
    log_decay, key_gate, write_weight, profile = (
        repeat_heads(x, spec.heads) for x in (*gates, routing.write_weight, routing.profile)
    )
    if key_gate is not None:
        psi = psi * key_gate.to(psi.dtype).unsqueeze(-1)
    far = psi if write_weight is None else psi * write_weight.to(psi.dtype).unsqueeze(-1)
    types, weight = routing.query_type, routing.read_weight
    return Tokens(
        phi, psi, far, v,
        None if log_decay is None else log_decay.double().clamp(min=FORGETS),
        None if profile is None else profile.long(),
        None if types is None else types.long(),
        None if weight is None else weight.to(state.dtype),
    )  # fmt: skip


def _features(
    state: StateTables, name: str, x: Tensor, num_heads: int, mapped: bool = False
) -> Tensor:
    """Map q or k to features, with the heads that the state has."""
    x = map_before(state, name, x, mapped)
    return repeat_heads(pointwise(state.pointwise, x.to(state.dtype)), num_heads)


def map_before(state: StateTables, name: str, x: Tensor, mapped: bool = False) -> Tensor:
    """Apply the part of the feature map that is not pointwise to q or k."""
    if state.map_before is not None and not mapped:
        features = state.map_before(x)
        check_features(name, x, features)
        x = features
    if x.shape[-1] != state.spec.feature_dim:
        raise ValueError(f"the state holds {state.spec.feature_dim} features, got {x.shape[-1]}")
    return x


def check_features(name: str, before: Tensor, after: Any) -> None:
    """Refuse what a caller's feature map made of q or k, unless only the width has changed."""
    check.check_tensor(f"the feature map of {name}", after, "floating-point")
    if after.shape[:-1] != before.shape[:-1] or after.shape[-1] == 0:
        raise ValueError(
            f"a feature map may change the width only, but it made {tuple(after.shape)} of {name} "
            f"{tuple(before.shape)}"
        )


def step_token(state: StateTables, inputs: Inputs, spread: bool) -> Tensor:
    """Take in one token, (B, 1, heads, .), and answer its queries, (B, Hq, V)."""
    tokens = load_tokens(state, *inputs[:5])
    meet_events(state)
    recent = state.own("recent")
    if tokens.log_decay is not None:
        gate = tokens.log_decay[:, 0]
        pass_gates(state, None, gate, torch.zeros_like(gate))
        recent *= decay_factor(gate, state.dtype)[..., None, None]
    recent.addcmul_(tokens.psi[:, 0].unsqueeze(-1), tokens.v[:, 0].unsqueeze(-2))
    _write_profile(state, tokens)
    y = _read_token(state, tokens)
    count_token(state, spread)
    return divide(y, state.spec.normalize)


def divide(y: Tensor, normalize: bool) -> Tensor:
    """Divide by the normaliser in the last column; a query that saw nothing gives 0."""
    return y[..., :-1] * inverse_or_zero(y[..., -1:]) if normalize else y


def meet_events(state: StateTables) -> None:
    """Let everything happen that happens before the next token."""
    for cohort in state.cohorts:
        if cohort.position >= cohort.quiet_until:
            enter(state, cohort)


def count_token(state: StateTables, spread: bool) -> None:
    """Move on by a token; ``spread`` does its share of the next fold."""
    for cohort in state.cohorts:
        cohort.position += 1
        if spread:
            spread_fold(state, cohort)


def pass_gates(state: StateTables, cohort: Cohort | None, total: Tensor, lost: Tensor) -> None:
    """Add log-gates (n, H) to lambda of a cohort, or of all rows, without losing digits.

    lambda is kept where tables decay; the recurrent states have their gates at once.
    """
    allocate_gates(state)
    if not tables_decay(state):
        return
    rows = slice(None) if cohort is None else cohort.where
    pair = state.own("log_decay")[0, rows]
    summed = pair[..., 0] + total
    rest = pair[..., 1] + (total - (summed - pair[..., 0])) + lost
    state.tensors["log_decay"][0, rows] = torch.stack([summed, rest], -1)


def tables_decay(state: StateTables) -> bool:
    """Whether gates act on tables, so that lambda is kept."""
    return state.has_tables and state.spec.decay_scope == "all"


def allocate_gates(state: StateTables) -> None:
    """Make room for lambda, if it is kept."""
    if tables_decay(state):
        state.allocate("log_decay", "edge_log_decay")
        if "profile_table" in state.tensors:
            state.allocate("profile_log_decay")


def _write_profile(state: StateTables, tokens: Tokens) -> None:
    """Add the token's state to its profile behind the newest edge, if that will be folded."""
    rows = [row for cohort in state.cohorts if cohort.is_folded for row in cohort.rows]
    if not rows:
        return
    slot = of_rows(state, lambda cohort: cohort.newest % state.num_slots)
    profile: int | Tensor
    if tokens.profile is None:
        profile = of_rows(state, lambda cohort: cohort.position % state.num_profiles)
    else:
        profile = tokens.profile[:, 0]
    entry, far, v = profile_entries(state, slot, profile), tokens.far[:, 0], tokens.v[:, 0]
    if len(rows) < len(state):
        where = torch.tensor(sorted(rows), device=state.device)
        entry, far, v = entry[where], far[where], v[where]
    write_entries(state, entry.flatten(), far.flatten(0, 1), v.flatten(0, 1))


def write_entries(state: StateTables, entry: Tensor, far: Tensor, v: Tensor) -> None:
    """Add outer products to profile entries, (M,), (M, r), (M, p); one may occur more than once."""
    table = state.own("profile_table").flatten(0, 3)
    if "profile_log_decay" in state.tensors:
        some = entry.unique()
        pairs = state.tensors["log_decay"].view(-1, 2)
        last = state.own("profile_log_decay").view(-1, 2)
        now = pairs[some // state.num_profiles % len(pairs)]
        left = decay_factor((now - last[some]).sum(-1), state.dtype)
        table[some] *= left[:, None, None]
        last[some] = now
    table.index_add_(0, entry, far.unsqueeze(-1) * v.unsqueeze(-2))


def of_rows(state: StateTables, value: Callable[[Cohort], int]) -> int | Tensor:
    """Find something that rows at one position share: one number, or (B, 1) if rows differ."""
    if len(state.cohorts) == 1:
        return value(state.cohorts[0])
    found = {row: value(cohort) for cohort in state.cohorts for row in cohort.rows}
    each = [[found[row]] for row in range(len(state))]
    return torch.tensor(each, device=state.device)


def profile_entries(state: StateTables, slot: int | Tensor, profile: int | Tensor) -> Tensor:
    """Number the profile entries (B, H) of slots and profiles, one each or (B, 1), (B, H)."""
    _, batch, heads, num_profiles = state.tensors["profile_table"].shape[:4]
    head = torch.arange(batch * heads, device=state.device).view(batch, heads)
    return (head + slot * (batch * heads)) * num_profiles + profile


def type_entries(
    state: StateTables, buffer: int | Tensor, rows: Tensor, query_type: int | Tensor
) -> Tensor:
    """Number the type entries (n, Hq, ...) of rows (n,) in buffers, one or (n, 1)."""
    _, batch, heads, num_types = state.tensors["type_table"].shape[:4]
    head = torch.arange(state.spec.query_heads, device=state.device) // state.spec.group
    entry = rows[:, None] * heads + head + buffer * (batch * heads)
    if isinstance(query_type, Tensor) and query_type.ndim > 2:
        entry = entry.view(*entry.shape, *[1] * (query_type.ndim - 2))
    return entry * num_types + query_type


def _read_token(state: StateTables, tokens: Tokens) -> Tensor:
    """Contract every query with the recurrent state of its window and with its type's state."""
    assert tokens.phi is not None
    spec = state.spec
    phi = tokens.phi[:, 0].unflatten(1, (spec.heads, spec.group))  # (B, H, G, r)
    segment = of_rows(state, lambda cohort: cohort.segment)
    slot, all_rows = segment % state.num_slots, torch.arange(len(state), device=state.device)
    window = _in_slot(state.tensors["recent"], slot)
    y = torch.bmm(phi.flatten(0, 1), window.flatten(0, 1)).view(len(state), spec.query_heads, -1)
    if spec.branch == "long_range":
        y.zero_()
    begun = segment > 0 if isinstance(segment, int) else bool((segment > 0).any())
    if not begun or not state.has_tables:
        return y
    if "edge_log_decay" in state.tensors:
        edge = _in_slot(state.tensors["edge_log_decay"], slot)
        pair = state.tensors["log_decay"][0] - edge
        phi = phi * decay_factor(pair.sum(-1), state.dtype)[..., None, None]
    query_type: int | Tensor
    if tokens.query_type is None:
        first = 1 - state.anchor
        query_type = of_rows(state, lambda cohort: (cohort.position + first) % state.num_types)
    else:
        query_type = tokens.query_type[:, 0]
    entry = type_entries(state, segment % state.num_buffers, all_rows, query_type)
    weight = None if tokens.read_weight is None else tokens.read_weight[:, 0].flatten(0, 1)
    seen = read_entries(state.tensors["type_table"], entry.flatten(0, 1), phi.flatten(0, 2), weight)
    seen = seen.view_as(y)
    if not isinstance(segment, int):
        seen = seen.masked_fill((segment == 0).unsqueeze(-1), 0)  # nothing is distant there yet
    return y + seen


def _in_slot(x: Tensor, slot: int | Tensor) -> Tensor:
    """Take a slot, or each row's own slot (B, 1), of (slots, B, ...)."""
    if isinstance(slot, int):
        return x[slot]
    return x[slot[:, 0], torch.arange(x.shape[1], device=x.device)]


def read_entries(table: Tensor, entry: Tensor, phi: Tensor, weight: Tensor | None) -> Tensor:
    """Contract each query with one entry, or with the weighted sum of several: (M, k), (M, r)."""
    feature_dim, aug_dim = table.shape[-2:]
    entry = entry.view(len(entry), -1, 1)
    feature = torch.arange(feature_dim, device=table.device)
    at_once = max(1, READ_ELEMENTS // (entry.shape[1] * feature_dim))
    answers = []
    for first in range(0, len(entry), at_once):
        some = slice(first, first + at_once)
        rows = (entry[some] * feature_dim + feature).flatten(1)
        weights = phi[some, None].expand(-1, entry.shape[1], -1)
        if weight is not None:
            weights = weights * weight[some].view(len(rows), -1, 1)
        answers.append(
            F.embedding_bag(
                rows, table.view(-1, aug_dim), mode="sum",
                per_sample_weights=weights.reshape(rows.shape),
            )
        )  # fmt: skip
    return torch.cat(answers)
