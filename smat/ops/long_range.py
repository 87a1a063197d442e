"""The long-range branch: pool by profile, tabulate, read by type (equation 6, adjoint 11).

The boundary may move: whenever it does, the keys that become distant are pooled on top of those
before them, and the type table is made anew. A boundary that stays is the case of one fold.

With gates, a key is pooled with exp(lambda_n - lambda_j) and a query reads with
exp(lambda_i - lambda_n), n the boundary: both are at most 1 (lemma "Gated SMat").

Work is O(T r p) for pooling and reading, and (d-2) q^d r p for each fold. Tables are held for a
block of features at a time, so that at d = 4 no whole table ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from smat.masks import Segment
from smat.ops.boundary_decay import BoundaryDecay
from smat.ops.grouping import Grouping
from smat.ops.routing import Routing
from smat.ops.sorted_groups import SortedGroups
from smat.ops.table_transform import TableTransform
from smat.ops.workspace import scratch

TABLE_BYTES = 24 << 20  # of one type table; a table that is larger is worked off by feature blocks
COLLECTED = 4096  # keys read at a time


class Source(Protocol):
    """Where features come from: N rows of keys, each with G heads of queries."""

    def phi(self, taken: slice) -> Tensor:
        """Return the features of some queries, (N, G, R, r)."""

    def far(self, span: slice) -> Tensor:
        """Return the features with which some keys are pooled, (N, t, r)."""

    def v(self, span: slice) -> Tensor:
        """Return the values of some keys, (N, t, p)."""

    def grad_y(self, taken: slice) -> Tensor:
        """Return the gradient of some outputs, (N, G, R, p)."""


class OfQueries:
    """Something about the queries that see distant keys, (N, G, R', .), by their boundary."""

    def __init__(self) -> None:
        self.parts: dict[int, tuple[int, Tensor]] = {}

    def of(self, boundary: int, taken: slice) -> Tensor | None:
        """Return what there is about some queries of a segment."""
        if boundary not in self.parts:
            return None
        first, part = self.parts[boundary]
        return part[:, :, taken.start - first : taken.stop - first]


class LongRangeGrads(NamedTuple):
    """Gradients of the queries that see distant keys, and of the keys that are ever distant."""

    phi: OfQueries
    read_weight: OfQueries
    psi: Tensor
    v: Tensor


@dataclass(frozen=True)
class LongRangeBranch:
    """The long-range branch of some rows."""

    source: Source
    decay: BoundaryDecay | None
    routing: Routing
    kept: Tensor | None = None  # (N B r p,), room for the type table of an only fold

    @cached_property
    def psi(self) -> Tensor:
        """The keys that are ever distant, (N, n, r)."""
        return self._collect("psi", self.source.far)

    @cached_property
    def v(self) -> Tensor:
        """The values that are ever distant, (N, n, p)."""
        return self._collect("v", self.source.v)

    @cached_property
    def phi(self) -> OfQueries:
        """The queries that see distant keys, (N, G, R, r) for each boundary."""
        return self._load(self.source.phi)

    @cached_property
    def grad_y(self) -> OfQueries:
        """The gradients of their answers, (N, G, R, p) for each boundary."""
        return self._load(self.source.grad_y)

    def made_of_queries(self, name: str, boundary: int, taken: slice) -> Tensor | None:
        """Return the `phi` or `grad_y` of some queries, if it was made for this branch."""
        made = vars(self).get(name)
        return None if made is None else made.of(boundary, taken)

    def made_of_keys(self, name: str, span: slice) -> Tensor | None:
        """Return the `psi` or `v` of some keys, if it was made for this branch."""
        made = vars(self).get(name)
        return None if made is None or span.stop > made.shape[1] else made[:, span]

    def _load(self, source: Callable[[slice], Tensor]) -> OfQueries:
        loaded = OfQueries()
        for segment in self.routing.folds():
            taken = self.routing.taken(segment)
            loaded.parts[segment.boundary] = (taken.start, source(taken))
        return loaded

    def _collect(self, name: str, read: Callable[[slice], Tensor]) -> Tensor:
        """Read all distant keys into scratch memory, a few at a time."""
        num_distant = self.routing.num_distant
        first = read(slice(0, min(num_distant, COLLECTED)))
        all_keys = scratch(name, (len(first), num_distant, first.shape[-1]), first)
        all_keys[:, :COLLECTED] = first
        for start in range(COLLECTED, num_distant, COLLECTED):
            stop = min(start + COLLECTED, num_distant)
            all_keys[:, start:stop] = read(slice(start, stop))
        return all_keys

    def forward(self) -> OfQueries:
        """Answer the queries that see distant keys."""
        y = OfQueries()
        for features in self._feature_blocks():
            for segment, table in self._make_type_tables(features):
                taken = self.routing.taken(segment)
                if taken.stop == taken.start:
                    continue
                asked = self.phi.parts[segment.boundary][1][..., features]
                answers = [
                    self._queries(segment, head).read(asked[:, head], table)
                    for head in range(asked.shape[1])
                ]
                answer = torch.stack(answers, 1) if len(answers) > 1 else answers[0].unsqueeze(1)
                if self.decay is not None:
                    answer = answer * self.decay.since(segment.boundary, self._at(segment))
                if segment.boundary in y.parts:
                    y.parts[segment.boundary][1].add_(answer)
                else:
                    y.parts[segment.boundary] = (taken.start, answer)
        return y

    def backward(self) -> LongRangeGrads:
        """Find the branch's gradients.

        The type tables, unless one was kept, are folded again, forwards, for the queries'
        gradients; the keys' gradients come from a table of gradients that is folded backwards,
        since a key that is distant for one query is distant for every later one.
        """
        of_keys = torch.zeros_like(self.psi), torch.zeros_like(self.v)
        grads = LongRangeGrads(OfQueries(), OfQueries(), *of_keys)
        phi = {boundary: part for boundary, (_, part) in self.phi.parts.items()}
        grad_y = {boundary: part for boundary, (_, part) in self.grad_y.parts.items()}
        if self.decay is not None:
            for segment in self.routing.folds():
                scale = self.decay.since(segment.boundary, self._at(segment))
                # Not in place: they may be the caller's own, and the causal branch uses them too.
                grad_y[segment.boundary] = grad_y[segment.boundary] * scale
        for features in self._feature_blocks():
            for segment, table in self._type_tables(features):
                taken = self.routing.taken(segment)
                if taken.stop == taken.start:
                    continue
                asked, grad = phi[segment.boundary], grad_y[segment.boundary]
                self._queries_backward(segment, features, asked, grad, table, grads)
            self._keys_backward(phi, grad_y, grads, features)
        return grads

    def _queries_backward(
        self,
        segment: Segment,
        features: slice,
        phi: Tensor,
        grad_y: Tensor,
        table: Tensor,
        grads: LongRangeGrads,
    ) -> None:
        """Find the gradients of a segment's queries, and of the weights of their reads."""
        first, boundary = self.routing.taken(segment).start, segment.boundary
        weight = self.routing.read_weight
        if boundary not in grads.phi.parts:
            grads.phi.parts[boundary] = (first, torch.empty_like(phi))
            if weight is not None:
                shape = (*phi.shape[:3], weight.shape[-1])
                grads.read_weight.parts[boundary] = (first, phi.new_zeros(shape))
        for head in range(phi.shape[1]):
            queries = self._queries(segment, head)
            part = grads.phi.parts[boundary][1][:, head, :, features]
            if weight is None:
                part.copy_(queries.read_left(grad_y[:, head], table))
                continue
            assert isinstance(queries, SortedGroups)
            asked = phi[:, head, :, features]
            grad_asked, grad_weight = queries.read_backward(asked, grad_y[:, head], table)
            part.copy_(grad_asked)
            grads.read_weight.parts[boundary][1][:, head].add_(grad_weight)

    @cached_property
    def _transform(self) -> TableTransform:
        routing = self.routing
        return TableTransform(routing.geometry, routing.profile_order, routing.type_order)

    @cached_property
    def _groups(self) -> dict[tuple[int, int], Grouping]:
        return {}

    def _queries(self, segment: Segment, head: int) -> Grouping:
        """Group a segment's queries by type; sorting them once is enough."""
        place = (segment.boundary, head)
        if place not in self._groups:
            self._groups[place] = self.routing.queries(segment, head, len(self.psi))
        return self._groups[place]

    def _keys(self, start: int, stop: int) -> Grouping:
        """Group a range of keys by profile; sorting them once is enough."""
        if (start, -1) not in self._groups:
            self._groups[start, -1] = self.routing.keys(start, stop)
        return self._groups[start, -1]

    def _keys_backward(
        self,
        phi: dict[int, Tensor],
        grad_y: dict[int, Tensor],
        grads: LongRangeGrads,
        features: slice,
    ) -> None:
        folds = self.routing.folds()
        starts = [0, *(segment.boundary for segment in folds)][:-1]
        grad_table: Tensor | None = None
        for segment, start in zip(reversed(folds), reversed(starts), strict=True):
            stop = segment.boundary
            asked, grad = phi[stop], grad_y[stop]
            for head in range(asked.shape[1] if asked.shape[2] else 0):
                grad_table = self._queries(segment, head).outer_sum(
                    asked[:, head, :, features], grad[:, head], "grad_table", grad_table
                )
            if grad_table is None:  # no query from here on
                continue
            grad_pooled = self._transform.backproject(grad_table)
            keys, span = self._keys(start, stop), slice(start, stop)
            grad_psi = keys.read_left(self.v[:, span], grad_pooled)
            grads.v[:, span] += keys.read(self._at_boundary(start, stop, features), grad_pooled)
            if self.decay is not None:
                grad_psi = grad_psi * self.decay.until(start, stop)
                grad_table *= self.decay.over_move(start, stop)
            grads.psi[:, span, features] = grad_psi

    def _type_tables(self, features: slice) -> Iterator[tuple[Segment, Tensor]]:
        """Give every segment its type table, the kept one or one made again."""
        if self.kept is None or not self.routing.folds():
            yield from self._make_type_tables(features)
        else:
            yield self.routing.folds()[0], self._kept_table(features, self.kept)

    def _make_type_tables(self, features: slice) -> Iterator[tuple[Segment, Tensor]]:
        """Give every segment its type table U = C F, F <- decay F + the newly distant keys."""
        pooled: Tensor | None = None
        start = 0
        for segment in self.routing.folds():
            stop = segment.boundary
            if pooled is not None and self.decay is not None:
                pooled *= self.decay.over_move(start, stop)
            pooled = self._keys(start, stop).outer_sum(
                self._at_boundary(start, stop, features), self.v[:, start:stop], "pooled", pooled
            )
            start = stop
            room = None if self.kept is None else self._kept_table(features, self.kept)
            yield segment, self._transform.tabulate(pooled, room)

    def _kept_table(self, features: slice, kept: Tensor) -> Tensor:
        """Return the kept memory of a block of features, (N, B, r', p)."""
        num_rows, _, value_dim = self.v.shape
        num_types = self.routing.geometry.num_types
        part = kept.view(self.psi.shape[-1], -1)[features]
        return part.view(num_rows, num_types, -1, value_dim)

    def _feature_blocks(self) -> Iterator[slice]:
        """Cut the features so that one block's table stays small."""
        key_dim = self.psi.shape[-1]
        row_size = self.v.shape[-1] * self.v.element_size()
        per_feature = len(self.psi) * self.routing.geometry.num_types * row_size
        num_blocks = -(-key_dim * per_feature // TABLE_BYTES)
        width = -(-key_dim // min(num_blocks, key_dim)) if num_blocks else key_dim
        for start in range(0, key_dim, width):
            yield slice(start, min(start + width, key_dim))

    def _at_boundary(self, start: int, stop: int, features: slice) -> Tensor:
        """Take a range of keys as they arrive at its end."""
        keys = self.psi[:, start:stop, features]
        return keys if self.decay is None else keys * self.decay.until(start, stop)

    def _at(self, segment: Segment) -> Tensor:
        """Return the positions of a segment's queries."""
        return self.routing.at(segment, self.psi.device)
