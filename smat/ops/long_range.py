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

from smat.geometry import Geometry
from smat.geometry.radon import backproject_tables, tabulate_tables
from smat.masks import Segment, SMatMask
from smat.ops.decay import LogDecay
from smat.ops.grouping import Grouping, PeriodicGroups, SortedGroups
from smat.ops.workspace import scratch

TABLE_BYTES = 24 << 20  # of one type table; a table that is larger is worked off by feature blocks
COLLECTED = 4096  # keys read at a time


@dataclass(frozen=True)
class Routing:
    """Who writes where and who reads what, for N rows: positional unless given by content."""

    mask: SMatMask
    segments: tuple[Segment, ...]
    profile: Tensor | None = None  # (N, T)
    query_type: Tensor | None = None  # (N, G, R)
    positions: Tensor | None = None  # (R,), sorted: the queries that there are

    @property
    def geometry(self) -> Geometry:
        """The geometry whose points and hyperplanes the routing names."""
        return self.mask.geometry

    def folds(self) -> list[Segment]:
        """The segments with distant keys; each begins with a fold."""
        return [segment for segment in self.segments if segment.boundary > 0]

    @property
    def num_distant(self) -> int:
        """The number of keys that are distant for some query."""
        return self.segments[-1].boundary

    def keys(self, start: int, stop: int) -> Grouping:
        """Group the keys of a range by profile."""
        num_profiles = self.geometry.num_profiles
        if self.profile is None:
            return PeriodicGroups(num_profiles, start)
        return SortedGroups(self.profile[:, start:stop], num_profiles)

    def taken(self, segment: Segment) -> slice:
        """Say which of the queries belong to a segment."""
        if self.positions is None:
            return slice(segment.start, segment.stop)
        edges = torch.tensor([segment.start, segment.stop], device=self.positions.device)
        return slice(*torch.searchsorted(self.positions, edges).tolist())

    def at(self, segment: Segment, device: torch.device) -> Tensor:
        """Return the positions of a segment's queries."""
        if self.positions is None:
            return torch.arange(segment.start, segment.stop, device=device)
        return self.positions[self.taken(segment)]

    def queries(self, segment: Segment, head: int, num_rows: int) -> Grouping:
        """Group a segment's queries by type, one head of the group at a time."""
        num_types = self.geometry.num_types
        if self.query_type is not None:
            return SortedGroups(self.query_type[:, head, self.taken(segment)], num_types)
        if self.positions is None:
            return PeriodicGroups(num_types, segment.start + 1 - self.mask.schedule.anchor)
        index = self.mask.query_type(self.positions[self.taken(segment)])
        return SortedGroups(index.expand(num_rows, -1), num_types)


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
    psi: Tensor
    v: Tensor


@dataclass(frozen=True)
class LongRangeBranch:
    """The long-range branch of some rows."""

    source: Source
    decay: LogDecay | None
    routing: Routing

    @cached_property
    def psi(self) -> Tensor:
        """The keys that are ever distant, (N, n, r)."""
        return self._collect("psi", self.source.far)

    @cached_property
    def v(self) -> Tensor:
        """The values that are ever distant, (N, n, p)."""
        return self._collect("v", self.source.v)

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
        phi = self._load(self.source.phi)
        for features in self._feature_blocks():
            for segment, table in self._type_tables(features):
                taken = self.routing.taken(segment)
                if taken.stop == taken.start:
                    continue
                asked = phi[segment.boundary][..., features]
                answers = [
                    self.routing.queries(segment, head, len(asked)).read(asked[:, head], table)
                    for head in range(asked.shape[1])
                ]
                answer = torch.stack(answers, 1) if len(answers) > 1 else answers[0].unsqueeze(1)
                if self.decay is not None:
                    answer = answer * self._since_boundary(self.decay, segment)
                if segment.boundary in y.parts:
                    y.parts[segment.boundary][1].add_(answer)
                else:
                    y.parts[segment.boundary] = (taken.start, answer)
        return y

    def backward(self) -> LongRangeGrads:
        """Find the branch's gradients.

        The type tables are folded again, forwards, for the queries' gradients; the keys' gradients
        come from a table of gradients that is folded backwards, since a key that is distant for one
        query is distant for every later one.
        """
        grads = LongRangeGrads(OfQueries(), torch.zeros_like(self.psi), torch.zeros_like(self.v))
        phi, grad_y = self._load(self.source.phi), self._load(self.source.grad_y)
        if self.decay is not None:
            for segment in self.routing.folds():
                scale = self._since_boundary(self.decay, segment)
                # Not in place: what was loaded may be the caller's own gradient.
                grad_y[segment.boundary] = grad_y[segment.boundary] * scale
        for features in self._feature_blocks():
            for segment, table in self._type_tables(features):
                taken = self.routing.taken(segment)
                if taken.stop == taken.start:
                    continue
                asked, grad = phi[segment.boundary], grad_y[segment.boundary]
                if segment.boundary not in grads.phi.parts:
                    grads.phi.parts[segment.boundary] = (taken.start, torch.empty_like(asked))
                for head in range(asked.shape[1]):
                    queries = self.routing.queries(segment, head, len(asked))
                    part = grads.phi.parts[segment.boundary][1]
                    part[:, head, :, features] = queries.read_left(grad[:, head], table)
            self._keys_backward(phi, grad_y, grads, features)
        return grads

    def _load(self, source: Callable[[slice], Tensor]) -> dict[int, Tensor]:
        """Get something about the queries of every segment that sees distant keys."""
        return {
            segment.boundary: source(self.routing.taken(segment))
            for segment in self.routing.folds()
        }

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
                queries = self.routing.queries(segment, head, len(asked))
                grad_table = queries.outer_sum(
                    asked[:, head, :, features], grad[:, head], "grad_table", grad_table
                )
            if grad_table is None:  # no query from here on
                continue
            grad_pooled = self._transform(backproject_tables, grad_table, "grad_pooled")
            keys, span = self.routing.keys(start, stop), slice(start, stop)
            grad_psi = keys.read_left(self.v[:, span], grad_pooled)
            if self.decay is not None:
                grad_psi = grad_psi * self._until_boundary(self.decay, start, stop)
                grad_table *= self._between_boundaries(self.decay, start, stop)
            grads.psi[:, span, features] = grad_psi
            grads.v[:, span] += keys.read(self._at_boundary(start, stop, features), grad_pooled)

    def _type_tables(self, features: slice) -> Iterator[tuple[Segment, Tensor]]:
        """Give every segment its type table U = C F, F <- decay F + the newly distant keys."""
        pooled: Tensor | None = None
        start = 0
        for segment in self.routing.folds():
            stop = segment.boundary
            if pooled is not None and self.decay is not None:
                pooled *= self._between_boundaries(self.decay, start, stop)
            pooled = self.routing.keys(start, stop).outer_sum(
                self._at_boundary(start, stop, features), self.v[:, start:stop], "pooled", pooled
            )
            start = stop
            yield segment, self._transform(tabulate_tables, pooled, "type_table")

    def _transform(self, transform: Callable[..., Tensor], table: Tensor, name: str) -> Tensor:
        """Tabulate or back-project (N, ., r, p) tables, into scratch memory."""
        geometry = self.routing.geometry
        num_rows, _, *state = table.shape
        to_types = transform is tabulate_tables
        num_answers = geometry.num_types if to_types else geometry.num_profiles
        out = scratch(name, (num_rows, num_answers, *state), table)
        transform(table.flatten(2), geometry.field_size, geometry.ambient_dim, out=out.flatten(2))
        return out

    def _feature_blocks(self) -> Iterator[slice]:
        """Cut the features so that one block's table stays small."""
        key_dim = self.psi.shape[-1]
        row_size = self.v.shape[-1] * self.v.element_size()
        per_feature = len(self.psi) * self.routing.geometry.num_types * row_size
        num_blocks = -(-key_dim * per_feature // TABLE_BYTES)
        width = -(-key_dim // min(num_blocks, key_dim)) if num_blocks else key_dim
        for start in range(0, key_dim, width):
            yield slice(start, start + width)

    def _at_boundary(self, start: int, stop: int, features: slice) -> Tensor:
        """Take a range of keys as they arrive at its end."""
        keys = self.psi[:, start:stop, features]
        return keys if self.decay is None else keys * self._until_boundary(self.decay, start, stop)

    def _until_boundary(self, decay: LogDecay, start: int, stop: int) -> Tensor:
        """What is left of every key of a range at its end, (N, t, 1)."""
        after = torch.arange(start + 1, stop + 1, device=self.psi.device)
        left = decay.between(torch.full_like(after, stop), after, self.psi.dtype)
        return left.unsqueeze(-1)

    def _since_boundary(self, decay: LogDecay, segment: Segment) -> Tensor:
        """What is left of the type table at each query of a segment, (N, 1, t, 1)."""
        after = self.routing.at(segment, self.psi.device) + 1
        boundary = torch.full_like(after, segment.boundary)
        return decay.between(after, boundary, self.psi.dtype)[:, None, :, None]

    def _between_boundaries(self, decay: LogDecay, earlier: int, later: int) -> Tensor:
        """What a move of the boundary leaves of what was pooled before, (N, 1, 1, 1)."""
        edge = torch.tensor([later, earlier], device=self.psi.device)
        return decay.between(edge[0], edge[1], self.psi.dtype).view(-1, 1, 1, 1)
