"""Fold a profile table into the type table, all at once or a little with every token (Algorithm 3).

    U' = exp(lambda_n' - lambda_n) U + C Delta

A fold is worked off in slabs, some columns of one head's r x p states at a time. Spread over the
tokens of a window's step, the share of a token is O(r p) for every d: the double buffer of the
lemma on horizon-free decoding. A slab of Delta is cleared as soon as it is folded, so that the edge
which takes its place finds zeros.
"""

from __future__ import annotations

import math
import sys

from torch import Tensor

from smat.geometry.radon import tabulate_tables
from smat.ops.linear.decay import decay_factor
from smat.ops.smat.cohorts import Cohort
from smat.ops.smat.state import StateTables

SLAB_ELEMENTS = 1 << 17  # of a profile table's columns: half a megabyte of fp32
LINE = 16  # columns: a cache line of fp32
FOR_EVER = sys.maxsize


def slab_width(state: StateTables) -> int:
    """Choose how many columns of a state a slab takes: whole cache lines, whatever the batch is."""
    columns = state.spec.feature_dim * state.spec.aug_dim
    fitting = SLAB_ELEMENTS // state.num_types // LINE * LINE
    return min(max(LINE, fitting), columns)


def num_slabs(state: StateTables) -> int:
    """Count the slabs of a fold."""
    columns = state.spec.feature_dim * state.spec.aug_dim
    return state.spec.heads * math.ceil(columns / slab_width(state))


def fold_slabs(state: StateTables, cohort: Cohort, segment: int, until: int) -> None:
    """Build the type table of a segment up to a number of slabs."""
    state.allocate("type_table")
    width, columns = slab_width(state), state.spec.feature_dim * state.spec.aug_dim
    per_head = math.ceil(columns / width)
    fold_slab = getattr(state.numbers, "fold_slab", _fold_slab)  # a backend may have its own
    for slab in range(cohort.built, until):
        head, place = divmod(slab, per_head)
        fold_slab(state, cohort, segment, head, slice(place * width, (place + 1) * width))
    cohort.built = max(until, cohort.built)


def _fold_slab(state: StateTables, cohort: Cohort, segment: int, head: int, columns: slice) -> None:
    geometry, slot = state.mask.geometry, (segment - 1) % state.num_slots
    at = (cohort.where, head, slice(None), columns)
    pooled = state.own("profile_table")[slot].flatten(-2)  # (B, H, profiles, columns)
    delta = pooled[at]
    between: Tensor | None = None
    if "profile_log_decay" in state.tensors:
        edge = lambda_at(state, cohort, segment)[:, head]
        last = cohort.pick(state.tensors["profile_log_decay"][slot])[:, head]
        left = decay_factor((edge[:, None] - last).sum(-1), state.dtype)
        delta = delta * left.unsqueeze(-1)
        earlier = lambda_at(state, cohort, segment - 1)[:, head]
        between = decay_factor((edge - earlier).sum(-1), state.dtype).view(-1, 1, 1)
    value = tabulate_tables(delta, geometry.field_size, geometry.ambient_dim)
    tables = state.own("type_table").flatten(-2)
    if segment > 1:
        old = tables[(segment - 1) % len(tables)][at]
        value = value + (old if between is None else old * between)
    tables[segment % len(tables)][at] = value
    pooled[at] = 0


def lambda_at(state: StateTables, cohort: Cohort, edge: int) -> Tensor:
    """Return lambda at an edge, as a pair of numbers that add up to it, (n, H, 2)."""
    if state.schedule.segment_boundary(edge) == cohort.position:  # it opens now
        return cohort.pick(state.tensors["log_decay"][0])
    return cohort.pick(state.tensors["edge_log_decay"][edge % state.num_slots])


def spread_fold(state: StateTables, cohort: Cohort, num_tokens: int = 1) -> None:
    """Do the share of the last few tokens in building the next type table."""
    if not state.has_tables or cohort.newest == cohort.segment:
        return
    tokens_left = state.schedule.segment_start(cohort.segment + 1) - cohort.position
    missing = num_slabs(state) - cohort.built
    share = math.ceil(missing * num_tokens / (num_tokens + tokens_left))
    fold_slabs(state, cohort, cohort.segment + 1, cohort.built + share)


def enter(state: StateTables, cohort: Cohort) -> None:
    """Let everything happen that happens before the next token: folds, then edges that open."""
    position, schedule = cohort.position, state.schedule
    segment, newest = schedule.segment_index(position), schedule.edge_index(position)
    last = max(0, position - 1)
    for each in range(schedule.segment_index(last) + 1, segment + 1):
        if state.has_tables:
            fold_slabs(state, cohort, each, num_slabs(state))
        cohort.built = 0
    for edge in range(schedule.edge_index(last) + 1, newest + 1):
        slot = edge % state.num_slots
        state.own("recent")[slot, cohort.where] = 0
        if "edge_log_decay" in state.tensors:
            now = cohort.pick(state.tensors["log_decay"][0])
            state.own("edge_log_decay")[slot, cohort.where] = now
    settle(state, cohort)


def settle(state: StateTables, cohort: Cohort) -> None:
    """Find out where a cohort stands among segments and edges, and until when nothing changes."""
    schedule = state.schedule
    segment, newest = (
        schedule.segment_index(cohort.position),
        schedule.edge_index(cohort.position),
    )
    cohort.segment, cohort.newest = segment, newest
    cohort.is_folded = state.has_tables and _has_segment(state, newest + 1)
    later = [FOR_EVER]
    if _has_segment(state, segment + 1):
        later.append(schedule.segment_start(segment + 1))
    if _has_segment(state, newest + 1):
        later.append(schedule.segment_boundary(newest + 1))
    cohort.quiet_until = min(later)
    _leave_profiles(state)


def _has_segment(state: StateTables, index: int) -> bool:
    num_segments = state.schedule.num_segments
    return num_segments is None or index < num_segments


def _leave_profiles(state: StateTables) -> None:
    """Give the profile tables up once no row will ever fold again."""
    if state.schedule.moves or "profile_table" not in state.tensors:
        return
    if not any(cohort.is_folded or cohort.quiet_until == 0 for cohort in state.cohorts):
        for name in ("profile_table", "profile_log_decay"):
            state.tensors.pop(name, None)
