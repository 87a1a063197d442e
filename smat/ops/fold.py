"""Fold a profile table into the type table, all at once or a little with every token (Algorithm 3).

    U' = exp(lambda_n' - lambda_n) U + C Delta

A fold is worked off in slabs of columns, columns being the r p numbers of a state. A slab is
gathered, sheared (the additive, factored tabulation) and scattered, and each of these stages can
stop after any row. Spread over the tokens of a block, the share of a token is O(r p) for every d:
the double buffer of the lemma on horizon-free decoding.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.geometry import Geometry
from smat.geometry.radon import shear_indices
from smat.ops.row_groups import RowGroup
from smat.ops.state import StateTables

LINE = 16  # columns: a cache line of fp32
MIN_WIDTH = 2 * LINE
SHEARED_ELEMENTS = 16384  # of the q^2 rows that a shear mixes
GATHER_COST, SCATTER_COST = 4, 6  # against one addition in cache: these wait for memory
CALL_COST = 1 << 16  # additions in the time that a call takes before it does anything


class Stage(NamedTuple):
    """One pass over the rows of a slab, at one level of the tabulation."""

    kind: str
    level: int  # dimension of the space whose hyperplanes are being summed
    shear: int
    num_rows: int
    cost: int  # of a row, in additions for each column


@lru_cache(maxsize=64)
def fold_stages(field_size: int, ambient_dim: int) -> tuple[Stage, ...]:
    """List the stages of a slab.

    >>> [(stage.kind, stage.num_rows) for stage in fold_stages(field_size=3, ambient_dim=2)]
    [('gather', 9), ('shear', 9), ('scatter', 9), ('lower', 3), ('scatter', 3)]

    Directions with leading zeros see the table summed over its first coordinate: a level below.
    """
    stages = [Stage("gather", ambient_dim, 0, field_size**ambient_dim, GATHER_COST)]
    for level in range(ambient_dim, min(ambient_dim, 1) - 1, -1):
        rows = field_size**level
        stages += [Stage("shear", level, at, rows, field_size) for at in range(level - 1)]
        stages.append(Stage("scatter", level, 0, rows, SCATTER_COST))
        if level > 1:
            stages.append(Stage("lower", level - 1, 0, rows // field_size, field_size))
    return tuple(stages)


def slab_width(geometry: Geometry, num_columns: int) -> int:
    """Choose how many columns of a state a slab takes: cache lines, whatever the batch is."""
    mixed = geometry.field_size ** min(2, geometry.ambient_dim)
    width = max(MIN_WIDTH, SHEARED_ELEMENTS // mixed // LINE * LINE)
    return min(width, -(-num_columns // LINE) * LINE)


class TableFold:
    """The fold that gives some batch rows the type table of a segment."""

    def __init__(self, state: StateTables, group: RowGroup, segment: int) -> None:
        self.group, self.segment = group, segment
        geometry, sizes = state.mask.geometry, state.sizes
        self.field_size, self.num_columns = geometry.field_size, sizes.feature_dim * sizes.aug_dim
        self.stages = fold_stages(geometry.field_size, geometry.ambient_dim)
        self.width = slab_width(geometry, self.num_columns)
        self.slabs_per_head = -(-self.num_columns // self.width)
        self.num_slabs = sizes.heads * self.slabs_per_head
        self.slab_cost = sum(stage.num_rows * stage.cost for stage in self.stages)
        self.stage = self.row = 0
        self.scratch: dict[tuple[str, int, int], Tensor] = {}
        self.head = -1
        self.left: Tensor | None = None  # of each profile entry, (n, P)
        self.between: Tensor | None = None  # what the move leaves of the old table, (n, H)
        self.edge: Tensor | None = None
        if "log_decay" in state.tensors:
            self.edge = lambda_at(state, group, segment).clone()
            earlier = lambda_at(state, group, segment - 1)
            self.between = decay_factor(self.edge - earlier, state.dtype)

    @property
    def finished(self) -> bool:
        """Whether the new table is complete."""
        return self.group.built >= self.num_slabs

    @property
    def cost_left(self) -> float:
        """What is still to be done, in additions: all slabs but for the rows already done."""
        columns = self.num_columns * len(self.group.rows) / self.slabs_per_head
        done = sum(stage.num_rows * stage.cost for stage in self.stages[: self.stage])
        done += self.row * self.stages[self.stage].cost
        slabs = self.num_slabs - self.group.built
        calls = slabs * len(self.stages) - self.stage
        return columns * (slabs * self.slab_cost - done) + calls * CALL_COST

    def advance(self, state: StateTables, budget: float = math.inf) -> float:
        """Work until the budget of additions is spent or the table is complete; return the cost."""
        spent = 0.0
        while spent < budget and not self.finished:
            stage = self.stages[self.stage]
            row_cost = stage.cost * self._columns_of_slab()
            rows = stage.num_rows - self.row
            if math.isfinite(budget):  # a call is worth at least as much work as its own cost
                rows = min(rows, math.ceil(max(budget - spent - CALL_COST, CALL_COST) / row_cost))
            getattr(self, "_" + stage.kind)(state, stage, self.row, self.row + rows)
            spent += rows * row_cost + CALL_COST
            self.row += rows
            if self.row == stage.num_rows:
                self.row, self.stage = 0, self.stage + 1
            if self.stage == len(self.stages):
                self.stage = 0
                self.group.built += 1
        return spent

    def _columns(self) -> tuple[int, slice]:
        """Say which head and which columns the current slab holds."""
        head, slab = divmod(self.group.built, self.slabs_per_head)
        return head, slice(slab * self.width, min((slab + 1) * self.width, self.num_columns))

    def _columns_of_slab(self) -> int:
        _, columns = self._columns()
        return len(self.group.rows) * (columns.stop - columns.start)

    def _table(self, state: StateTables, name: str, num_rows: int) -> Tensor:
        key = (name, num_rows, self._columns_of_slab())
        if key not in self.scratch:
            self.scratch[key] = torch.empty(key[1:], dtype=state.dtype, device=state.device)
        return self.scratch[key]

    def _level(self, state: StateTables, level: int) -> Tensor:
        return self._table(state, "level", self.field_size**level)

    def _take(self, x: Tensor, head: int, rows: slice, columns: slice) -> Tensor:
        """Take a part of a slab from a table (B, H, rows, r, p): (n, rows, columns)."""
        part = x.flatten(-2)[:, head, rows, columns]
        return part if self.group.index is None else part[self.group.index]

    def _gather(self, state: StateTables, stage: Stage, start: int, stop: int) -> None:
        """Bring profile entries to the new boundary; those of another epoch are zero."""
        head, columns = self._columns()
        if head != self.head:
            self._enter_head(state, head)
        assert self.left is not None
        slot = (self.segment - 1) % state.timeline.num_slots
        rows, left = slice(start, stop), self.left[:, start:stop, None]
        part = self._take(state.tensors["profile_table"][slot], head, rows, columns)
        by_row = self._level(state, stage.level)[rows].view(stop - start, *part.shape[::2])
        # A product alone would let a NaN of an entry that no longer counts through.
        by_row.copy_(torch.where(left > 0, part * left, 0).transpose(0, 1))

    def _enter_head(self, state: StateTables, head: int) -> None:
        slot = (self.segment - 1) % state.timeline.num_slots
        counts = pick(state.tensors["profile_epoch"][slot], self.group)[:, head] == self.segment - 1
        self.head, self.left = head, counts.to(state.dtype)
        if self.edge is not None:
            last = pick(state.tensors["profile_log_decay"][slot], self.group)[:, head]
            self.left *= decay_factor(self.edge[:, head, None] - last, state.dtype)

    def _shear(self, state: StateTables, stage: Stage, start: int, stop: int) -> None:
        names = ("level", "odd", "even")
        source = names[0] if stage.shear == 0 else names[1 + (stage.shear - 1) % 2]
        table = self._table(state, source, stage.num_rows)
        index = shear_indices(self.field_size, stage.level, state.device)[stage.shear]
        target = self._table(state, names[1 + stage.shear % 2], stage.num_rows)
        target[start:stop] = F.embedding_bag(index[start:stop], table, mode="sum")

    def _lower(self, state: StateTables, stage: Stage, start: int, stop: int) -> None:
        upper = self._level(state, stage.level + 1)
        cut = upper.view(self.field_size, -1, upper.shape[1])[:, start:stop]
        torch.sum(cut, 0, out=self._level(state, stage.level)[start:stop])

    def _scatter(self, state: StateTables, stage: Stage, start: int, stop: int) -> None:
        """Write the rows of a level into the new table, on top of the old one."""
        head, columns = self._columns()
        num_shears = stage.level - 1
        name = "level" if num_shears < 1 else ("odd", "even")[(num_shears - 1) % 2]
        table = self._table(state, name, stage.num_rows)[start:stop]
        value = table.view(stop - start, len(self.group.rows), -1).transpose(0, 1)
        above = sum(self.field_size**level for level in range(stage.level + 1, self._top + 1))
        rows = slice(above + start, above + stop)
        tables = state.own("type_table")
        if self.segment > 1:
            old = self._take(tables[(self.segment - 1) % len(tables)], head, rows, columns)
            if self.between is not None:
                old = old * self.between[:, head, None, None]
            value = value + old
        target = tables[self.segment % len(tables)].flatten(-2)
        if self.group.index is None:
            target[:, head, rows, columns] = value
        else:
            target[self.group.index, head, rows, columns] = value

    @property
    def _top(self) -> int:
        return self.stages[0].level


def pick(x: Tensor, group: RowGroup) -> Tensor:
    """Take a group's rows of a tensor with the batch in front; a view if that is all of them."""
    return x if group.index is None else x[group.index]


def lambda_at(state: StateTables, group: RowGroup, edge: int) -> Tensor:
    """Return lambda at an edge, as a pair of numbers that add up to it, (n, H, 2)."""
    if state.timeline.edge(edge) == group.position:  # it opens now
        return pick(state.tensors["log_decay"][0], group)
    slot = edge % state.timeline.num_slots
    return pick(state.tensors["edge_log_decay"][slot], group)


def decay_factor(difference: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponentiate a difference of lambdas, given as pairs, (..., 2) -> (...)."""
    return difference.sum(-1).clamp(max=0.0).exp().to(dtype)


def spread_fold(state: StateTables, group: RowGroup, num_tokens: int = 1) -> None:
    """Do the share of some tokens in building the next type table."""
    moment = state.timeline.at(group.position - 1)
    if moment.newest == moment.segment or group.position < 1:
        return
    tokens_left = state.timeline.start(moment.segment + 1) - group.position + num_tokens
    if group.fold is None:
        group.fold = TableFold(state, group, moment.segment + 1)
    if tokens_left <= num_tokens:
        group.fold.advance(state)
        return
    group.credit += group.fold.cost_left * num_tokens / tokens_left
    if group.credit >= 2 * CALL_COST:
        group.credit -= group.fold.advance(state, group.credit)


def fold_now(state: StateTables, group: RowGroup, segment: int) -> None:
    """Give a group the type table of the segment that it enters."""
    state.allocate("type_table")
    (group.fold or TableFold(state, group, segment)).advance(state)
    group.fold, group.built, group.credit = None, 0, 0.0
