"""The long-range branch on a GPU: pool by profile, tabulate, read by type (equation 6, adjoint 11).

The torch form, which says how gates and moving boundaries enter, is `smat.ops.smat.long_range`. A
row is a head of values of a batch row. Tables are held for some rows at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smat.masks import Segment, SMatMask
from smat.ops.linear.decay import FORGETS, decay_factor
from smat.ops.smat.arguments import repeat_heads
from smat.ops.smat.long_range import decay_backward
from smat.ops.smat.routing import Inputs, Options
from smat.ops.smat.triton.groups import Visits
from smat.ops.smat.triton.pool import pool
from smat.ops.smat.triton.read import count_parts, pull, read
from smat.ops.smat.triton.shear import backproject, tabulate
from smat.ops.smat.triton.tokens import Side

TABLE_BYTES = 1 << 30  # of the type tables of some rows; those of profiles are smaller


class Fold(NamedTuple):
    """A segment with distant keys: the visits of the keys that are new to it, and of its queries."""

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
            by_profile = Visits.positional(num_profiles, start, n, 0, 1, self.most[0])
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
        whole = torch.nn.functional.pad(torch.cat(parts, -1), (before, behind), value=1.0)
        return whole.transpose(1, 2).contiguous()

    def cut_rows(self) -> Iterator[tuple[int, int]]:
        """Cut the rows of the batch so that tables stay small: the first, and how many."""
        row_bytes = 4 * self.geometry.num_types * self.keys.num_columns
        total, some = self.num_batch * self.num_rows, max(1, TABLE_BYTES // row_bytes)
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
        return _new(self.keys.left, num_rows, num_entries, self.keys.num_columns)

    def type_tables(self, first_row: int, num_rows: int) -> Iterator[tuple[Fold, Tensor]]:
        """Give every fold its type table: U = C F, F <- decay F + the newly distant keys."""
        table = self.new_table([fold.by_profile for fold in self.folds], num_rows)
        for number, fold in enumerate(self.folds):
            pooled = pool(
                fold.by_profile, self.keys, table, first_row, fold.over_move, onto=number > 0
            )
            yield fold, tabulate(pooled, self.geometry.field_size, self.geometry.ambient_dim)


def long_range(
    inputs: Inputs,
    options: Options,
    mask: SMatMask,
    segments: Sequence[Segment],
    cum: Tensor | None,
) -> tuple[int, Tensor, Tensor | None]:
    """Let queries see the distant keys on their hyperplanes; the first that does, and from it on
    the numerators (B, T - first, H, V) and the normalisers (B, T - first, H), if there are any.

    `cum` are the sums of gates, None if the long range does not decay.
    """
    folds = Folds(inputs, options, mask, segments, cum)
    size = folds.num_batch, folds.length - folds.first, folds.num_heads, folds.reads
    y = _new(inputs.v, *size, inputs.v.shape[-1])
    z = _new(inputs.v, *size) if options.normalize else None
    for first_row, num_rows in folds.cut_rows():
        for fold, table in folds.type_tables(first_row, num_rows):
            read(fold.by_type, folds.queries, table, y, z, first_row, folds.first, add=False)
    return folds.first, _sum_reads(y, 3), None if z is None else _sum_reads(z, 3)


def long_range_backward(
    inputs: Inputs,
    options: Options,
    mask: SMatMask,
    segments: Sequence[Segment],
    cum: Tensor | None,
    grad_out: Tensor,
    inverse: Tensor | None,
    delta: Tensor | None,
    grads: dict[str, Tensor],
) -> None:
    """Add to the gradients, by name, what the long range gives: fp32, of all tokens.

    The gradient of a numerator is `grad_out` times `inverse`, that of a normaliser -`delta` times
    `inverse`, (B, T, H) each; without a division both are None.
    """
    folds = Folds(inputs, options, mask, segments, cum)
    keys, queries = folds.keys, folds.queries
    queries = queries._replace(
        right=grad_out,
        scale=multiply(inverse, queries.scale),
        last=None if delta is None else delta.contiguous(),
    )
    by_query = by_key = None
    if cum is not None or queries.weight is not None:
        by_query = _new_dots(queries, folds.reads)
    if keys.scale is not None:
        by_key = _new_dots(keys, 1)
    grad_q = _Sum(grads["q"], folds.first, folds.length, folds.num_heads, folds.reads)
    grad_k = _Sum(grads["k"], 0, folds.num_distant, folds.num_rows, 1)
    grad_v = grads["v"].unsqueeze(3)
    pulling = keys._replace(scale=None, weight=keys.scale)
    for first_row, num_rows in folds.cut_rows():
        for fold, table in folds.type_tables(first_row, num_rows):
            pull(fold.by_type, queries, table, grad_q.parts, by_query, first_row,
                 grad_q.start, add=grad_q.direct)  # fmt: skip
        for fold, table in folds.profile_grads(queries, first_row, num_rows):
            read(fold.by_profile, keys, table, grad_v, None, first_row, add=True)
            pull(fold.by_profile, pulling, table, grad_k.parts, by_key, first_row,
                 add=grad_k.direct)  # fmt: skip
    grad_q.finish()
    grad_k.finish()
    _weights_backward(folds, inputs, by_query, by_key, grads)


def _weights_backward(
    folds: Folds,
    inputs: Inputs,
    by_query: Tensor | None,
    by_key: Tensor | None,
    grads: dict[str, Tensor],
) -> None:
    """Add the gradients of gates and weights: each is what its token takes part in, but for it."""
    if by_query is not None:
        by_query = by_query.sum(-1)
        if folds.queries.weight is not None:
            grads["read_weight"] += by_query.view_as(grads["read_weight"])
            by_query = by_query * folds.queries.weight.view_as(by_query)
    if by_key is None:
        return
    by_key = by_key.sum((-1, -2))
    distant = slice(0, folds.num_distant)
    gate, weight, left = folds.key_gate, folds.write_weight, folds.until_boundary
    if gate is not None:
        moved = multiply(by_key, weight, left)[:, distant]
        grads["key_gate"][:, distant] += _sum_reads(
            moved.unflatten(2, (inputs.k.shape[2], -1)), 3
        )
    if weight is not None:
        grads["write_weight"][:, distant] += multiply(by_key, gate, left)[:, distant]
    if left is not None:
        assert by_query is not None and inputs.gates.log_decay is not None
        asked = by_query.sum(-1).unflatten(2, (folds.num_rows, -1)).sum(-1)
        took = (by_key * folds.keys.scale).transpose(1, 2)
        moved = decay_backward(
            asked.transpose(1, 2).flatten(0, 1), took.flatten(0, 1), folds.num_distant
        )
        moved = moved.view_as(took).transpose(1, 2)
        grads["log_decay"] += moved.masked_fill(inputs.gates.log_decay <= FORGETS, 0.0)


class _Sum:
    """Where visits leave gradients: the gradient itself if a token has one, else a row a visit."""

    def __init__(self, grad: Tensor, start: int, stop: int, num_heads: int, reads: int) -> None:
        self.grad, self.tokens = grad, slice(start, stop)
        self.direct = num_heads == grad.shape[2] and reads == 1
        self.start = 0 if self.direct else start
        self.parts = grad.unsqueeze(3)
        if not self.direct:
            size = len(grad), stop - start, num_heads, reads, grad.shape[-1]
            self.parts = _new(grad, *size)

    def finish(self) -> None:
        """Add the rows up."""
        if not self.direct:
            by_head = self.parts.flatten(2, 3).unflatten(2, (self.grad.shape[2], -1))
            self.grad[:, self.tokens] += by_head.sum(3)


def multiply(*factors: Tensor | None) -> Tensor | None:
    """Multiply those that are given, in fp32; None if there is none."""
    product = None
    for factor in factors:
        if factor is not None:
            product = factor.float() if product is None else product * factor.float()
    return None if product is None else product.contiguous()


def between(cum: Tensor, later: slice | int, earlier: slice | int) -> Tensor:
    """Multiply the gates between numbers of tokens, of sums (2, B, rows, T + 1): (B, rows, .)."""
    coarse, fine = cum.double()
    difference = coarse[..., later] - coarse[..., earlier]
    return decay_factor(difference + (fine[..., later] - fine[..., earlier]), torch.float32)


def _new(like: Tensor, *size: int) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=like.device)


def _new_dots(side: Side, reads: int) -> Tensor:
    """Make room for a number a visit and part of its vector; 0 where there is no visit."""
    heads = side.right.shape[2]
    size = *side.left.shape[:2], heads, reads, count_parts(side)
    return torch.zeros(size, dtype=torch.float32, device=side.left.device)


def _sum_reads(x: Tensor, dim: int) -> Tensor:
    return x.squeeze(dim) if x.shape[dim] == 1 else x.sum(dim)
