"""The folds of a call, what its tokens bring along, and the tables of some rows.

A row is a head of values of a batch row. Factors that gates leave are made by torch, a number a
token; kernels take them as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.masks import Segment, SMatMask
from smat.ops.feature_maps import repeat_heads
from smat.ops.linear.decay import decay_factor
from smat.ops.smat.routing import Inputs, Options
from smat.ops.smat.triton.groups import Visits
from smat.ops.smat.triton.pool import pool
from smat.ops.smat.triton.shear import backproject, tabulate
from smat.ops.smat.triton.tokens import Side

TABLE_BYTES = 1 << 30  # of the type tables of some rows; those of profiles are smaller


class Fold(NamedTuple):
    """A segment with distant keys: the visits of keys that are new to it, and of its queries."""

    by_profile: Visits
    by_type: Visits
    over_move: Tensor | None  # (B rows,), what the move of the boundary leaves of earlier keys


class Folds:
    """The folds of a call, what its tokens bring along, and the tables of some rows."""

    def __init__(
        self,
        inputs: Inputs,
        options: Options,
        mask: SMatMask,
        segments: Sequence[Segment],
        cum: Tensor | None,
    ) -> None:
        q, k, v, gates, routing, _ = inputs
        self.geometry, self.mask, self.routing, self.cum = mask.geometry, mask, routing, cum
        self.num_batch, self.length, self.num_rows = v.shape[:3]
        self.num_heads = max(q.shape[2], self.num_rows)  # of the answers
        moving = [segment for segment in segments if segment.boundary > 0]
        self.first = moving[0].start if moving else self.length  # query with distant keys
        self.num_distant = moving[-1].boundary if moving else 0
        starts = [0, *(segment.boundary for segment in moving)]
        self.most = [  # keys that a fold is given, and queries
            max((b - a for a, b in spans), default=0)
            for spans in (list(itertools.pairwise(starts)), [each[:2] for each in moving])
        ]
        self.folds = [self._fold(at, each) for at, each in zip(starts, moving, strict=False)]
        self.reads = self.folds[0].by_type.reads if moving else 1
        self.until_boundary, since_boundary = self._left_of_keys(), self._left_of_tables()
        gate = None if gates.key_gate is None else repeat_heads(gates.key_gate, self.num_rows)
        self.key_gate, self.write_weight = gate, routing.write_weight
        weight = None if routing.read_weight is None else routing.read_weight.float().contiguous()
        common = self.num_rows, options.feature_map, options.normalize
        scale = multiply(gate, routing.write_weight, self.until_boundary)
        self.keys = Side(k, v, scale, None, None, *common)
        self.queries = Side(q, v, since_boundary, weight, None, *common)

    def _fold(self, start: int, segment: Segment) -> Fold:
        profile, types, n = self.routing.profile, self.routing.query_type, segment.boundary
        num_profiles, num_types = self.geometry.num_profiles, self.geometry.num_types
        heads, asked = self.num_heads // self.num_rows, slice(segment.start, segment.stop)
        if profile is None:
            shift = self.mask.schedule.offset
            by_profile = Visits.positional(num_profiles, start, n, shift, 1, self.most[0])
        else:
            by_profile = Visits.routed(self._by_row(profile[:, start:n]), num_profiles, start)
        if types is None:
            groups = num_types, *segment[:2], 1 - self.mask.anchor, heads, self.most[1]
            by_type = Visits.positional(*groups)
        else:
            by_type = Visits.routed(self._by_row(types[:, asked]), num_types, asked.start, heads)
        over_move = None if self.cum is None else between(self.cum, n, start).flatten()
        return Fold(by_profile, by_type, over_move)

    def _by_row(self, index: Tensor) -> Tensor:
        """(B, t, heads[, reads]) -> (B rows, t, heads of a row and reads)."""
        by_row = index.long().reshape(*index.shape[:2], self.num_rows, -1)
        return by_row.transpose(1, 2).flatten(0, 1)

    def _left_of_keys(self) -> Tensor | None:
        """What is left of each key at the boundary, (B, T, rows); 1 of those never distant."""
        if self.cum is None or not self.folds:
            return None
        parts = [
            between(self.cum, slice(n, n + 1), slice(start + 1, n + 1))
            for start, n in ((fold.by_profile.start, fold.by_profile.stop) for fold in self.folds)
        ]
        return self._pad(parts, 0, self.length - self.num_distant)

    def _left_of_tables(self) -> Tensor | None:
        """What is left of the type table at each query, (B, T, heads); 1 before the first."""
        if self.cum is None or not self.folds:
            return None
        parts = [
            between(self.cum, slice(visits.start + 1, visits.stop + 1), slice(n, n + 1))
            for visits, n in ((fold.by_type, fold.by_profile.stop) for fold in self.folds)
        ]
        return repeat_heads(self._pad(parts, self.first, 0), self.num_heads).contiguous()

    def _pad(self, parts: list[Tensor], before: int, behind: int) -> Tensor:
        """Join parts (B, rows, t) to (B, T, rows), with ones around them."""
        whole = F.pad(torch.cat(parts, -1), (before, behind), value=1.0)
        return whole.transpose(1, 2).contiguous()

    def cut_rows(self) -> Iterator[tuple[int, int]]:
        """Cut the rows of the batch so that tables stay small: the first, and how many."""
        row_bytes = 4 * self.geometry.num_types * self.keys.num_columns
        total = self.num_batch * self.num_rows if self.folds else 0
        some = max(1, TABLE_BYTES // row_bytes)
        for first in range(0, total, some):
            yield first, min(some, total - first)

    def profile_grads(
        self, queries: Side, first_row: int, num_rows: int
    ) -> Iterator[tuple[Fold, Tensor]]:
        """Give every fold the gradient of its profile table, the last fold first.

        A key that is distant for one query is distant for every later one.
        """
        table = self.new_table([fold.by_type for fold in self.folds], num_rows)
        over_move = None
        for number, fold in enumerate(reversed(self.folds)):
            pooled = pool(fold.by_type, queries, table, first_row, over_move, onto=number > 0)
            yield fold, backproject(pooled, self.geometry.field_size, self.geometry.ambient_dim)
            over_move = fold.over_move

    def new_table(self, visits: Sequence[Visits], num_rows: int) -> Tensor:
        """Make a table that visits of several folds can be pooled into."""
        num_entries = max(each.num_pooled for each in visits)
        return new_empty(self.keys.left, num_rows, num_entries, self.keys.num_columns)

    def type_tables(self, first_row: int, num_rows: int) -> Iterator[tuple[Fold, Tensor]]:
        """Give every fold its type table: U = C F, F <- decay F + the newly distant keys."""
        table = self.new_table([fold.by_profile for fold in self.folds], num_rows)
        for number, fold in enumerate(self.folds):
            pooled = pool(
                fold.by_profile, self.keys, table, first_row, fold.over_move, onto=number > 0
            )
            yield fold, tabulate(pooled, self.geometry.field_size, self.geometry.ambient_dim)


def multiply(*factors: Tensor | None) -> Tensor | None:
    """Multiply those that are given, in fp32; None if there is none."""
    given = [factor.float() for factor in factors if factor is not None]
    return reduce(torch.mul, given).contiguous() if given else None


def between(cum: Tensor, later: slice | int, earlier: slice | int) -> Tensor:
    """Multiply the gates between numbers of tokens, of sums (2, B, rows, T + 1): (B, rows, .)."""
    coarse, fine = cum.double()
    difference = coarse[..., later] - coarse[..., earlier]
    return decay_factor(difference + (fine[..., later] - fine[..., earlier]), torch.float32)


def new_empty(like: Tensor, *size: int) -> Tensor:
    """Make room for fp32 numbers beside a tensor."""
    return torch.empty(size, dtype=torch.float32, device=like.device)
