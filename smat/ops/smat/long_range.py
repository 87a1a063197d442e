"""The long-range branch: pool by profile, tabulate, read by type (equation 6, adjoint 11).

The boundary may move: whenever it does, the keys that become distant are pooled on top of those
before them, and the type table is made anew. A boundary that stays is the case of one fold.

With gates, a key is pooled with exp(lambda_n - lambda_j) and a query reads with
exp(lambda_i - lambda_n), n the boundary: both are at most 1 (lemma "Gated SMat").

Work is O(T r p) for pooling and reading, and (d-2) q^d r p for each fold. Tables are held for some
of the features at a time, so that at d = 4 no whole table ever exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.geometry.radon import backproject_tables, tabulate_tables
from smat.masks import Segment, SMatMask
from smat.ops.linear.decay import LogDecay
from smat.ops.smat.groups import Groups, PeriodicGroups, SortedGroups, VisitOrder
from smat.ops.smat.routing import Routing

TABLE_BYTES = 24 << 20  # of one type table; a larger one is worked off by some features at a time


class Fold(NamedTuple):
    """A segment with distant keys: which keys are new to it, who asks, and their groups."""

    keys: slice
    queries: slice
    by_profile: Groups
    by_type: list[Groups]  # for each head of queries

    @property
    def boundary(self) -> int:
        """The end of the new keys."""
        return int(self.keys.stop)


class Folds:
    """The folds of some rows, one row a head of values, and their tables.

    Tables whose groups are given by content hold them in the order of their visits.
    """

    def __init__(
        self,
        phi: Tensor,
        psi: Tensor,
        routing: Routing,
        mask: SMatMask,
        segments: Sequence[Segment],
    ) -> None:
        self.geometry, self.mask, self.routing = mask.geometry, mask, routing
        moving = [segment for segment in segments if segment.boundary > 0]
        self.num_distant = moving[-1].boundary if moving else 0
        self.first = moving[0].start if moving else phi.shape[2]  # query with distant keys
        self.profiles = self.types = None
        if routing.profile is not None:
            distant = routing.profile[:, : self.num_distant]
            self.profiles = VisitOrder.of(distant, self.geometry.num_profiles)
        if routing.query_type is not None:
            self.types = VisitOrder.of(routing.query_type, self.geometry.num_types)
        starts = [0, *(segment.boundary for segment in moving)]
        self.folds = [
            Fold(
                slice(start, segment.boundary), slice(segment.start, segment.stop),
                self._by_profile(start, segment.boundary),
                [self._by_type(segment, head) for head in range(phi.shape[1])],
            )
            for start, segment in zip(starts, moving, strict=False)
        ]  # fmt: skip

    def _by_profile(self, start: int, stop: int) -> Groups:
        num_profiles = self.geometry.num_profiles
        if self.profiles is None or self.routing.profile is None:
            return PeriodicGroups(num_profiles, start + self.mask.schedule.offset)
        profile = self.profiles.rename(self.routing.profile[:, start:stop])
        return SortedGroups(profile, num_profiles)

    def _by_type(self, segment: Segment, head: int) -> Groups:
        num_types, weight = self.geometry.num_types, self.routing.read_weight
        if self.types is None or self.routing.query_type is None:
            return PeriodicGroups(num_types, segment.start + 1 - self.mask.anchor)
        asked = slice(segment.start, segment.stop)
        query_type = self.types.rename(self.routing.query_type[:, head, asked])
        return SortedGroups(
            query_type, num_types, None if weight is None else weight[:, head, asked]
        )

    def tabulate(self, pooled: Tensor) -> Tensor:
        """Sum profile states over hyperplanes, (R, P, r, p) -> (R, types, r, p)."""
        table = tabulate_tables(
            pooled.flatten(2), self.geometry.field_size, self.geometry.ambient_dim,
            place=None if self.profiles is None else self.profiles.place,
            order=None if self.types is None else self.types.group,
        )  # fmt: skip
        return table.unflatten(2, pooled.shape[2:])

    def backproject(self, table: Tensor) -> Tensor:
        """Sum type states over the hyperplanes through a point: (R, P, r, p)."""
        pooled = backproject_tables(
            table.flatten(2), self.geometry.field_size, self.geometry.ambient_dim,
            place=None if self.types is None else self.types.place,
            order=None if self.profiles is None else self.profiles.group,
        )  # fmt: skip
        return pooled.unflatten(2, table.shape[2:])

    def type_tables(
        self, psi: Tensor, v: Tensor, decay: LogDecay | None
    ) -> Iterator[tuple[Fold, Tensor]]:
        """Give every fold its type table: U = C F, F <- decay F + the newly distant keys."""
        pooled: Tensor | None = None
        for fold in self.folds:
            if pooled is not None and decay is not None:
                pooled *= _over_move(decay, fold, v.dtype)
            keys = psi[:, fold.keys]
            if decay is not None:
                keys = keys * _until_boundary(decay, fold, v.dtype)
            pooled = fold.by_profile.pool(keys, v[:, fold.keys], pooled)
            yield fold, self.tabulate(pooled)

    def feature_blocks(self, psi: Tensor, v: Tensor) -> Iterator[slice]:
        """Cut the features so that the table of each cut stays small."""
        num_features = psi.shape[-1]
        table_bytes = len(v) * self.geometry.num_types * v.shape[-1] * v.element_size()
        num_cuts = min(num_features, -(-num_features * table_bytes // TABLE_BYTES)) or 1
        width = -(-num_features // num_cuts)
        for start in range(0, num_features, width):
            yield slice(start, min(start + width, num_features))


def long_range(
    phi: Tensor,
    psi: Tensor,
    v: Tensor,
    decay: LogDecay | None,
    routing: Routing,
    mask: SMatMask,
    segments: Sequence[Segment],
) -> tuple[int, Tensor]:
    """Let queries see the distant keys on their hyperplanes; the first that does, and y from it on.

    phi (R, G, T, r), psi (R, T, r), v (R, T, p), sums of gates (R, T + 1), profile (R, T), types
    and their weights (R, G, T) or (R, G, T, k): G heads of queries share a row. y is
    (R, G, T - first, p).
    """
    folds = Folds(phi, psi, routing, mask, segments)
    y = v.new_zeros(*phi.shape[:2], phi.shape[2] - folds.first, v.shape[-1])
    for features in folds.feature_blocks(psi, v):
        for fold, table in folds.type_tables(psi[..., features], v, decay):
            for head, by_type in enumerate(fold.by_type):
                y[:, head, _from(folds.first, fold.queries)] += by_type.read(
                    phi[:, head, fold.queries, features], table
                )
    if decay is not None:
        y *= _since_boundary(decay, folds, v.dtype)
    return folds.first, y


class LongRangeGrads(NamedTuple):
    """Gradients of the arguments of `long_range`, of the keys and queries that take part in it."""

    phi: Tensor  # (R, G, T - first, r)
    psi: Tensor  # (R, n, r), of the n keys that are ever distant
    v: Tensor  # (R, n, p)
    log_decay: Tensor | None  # (R, T)
    read_weight: Tensor | None  # (R, G, T, k)


def long_range_backward(
    phi: Tensor,
    psi: Tensor,
    v: Tensor,
    decay: LogDecay | None,
    routing: Routing,
    mask: SMatMask,
    segments: Sequence[Segment],
    grad_y: Tensor,
) -> LongRangeGrads:
    """Find the gradients of `long_range`, given that of all answers, (R, G, T, p).

    Type tables are folded again, forwards, for the queries' gradients; the keys' gradients come
    from a table of gradients that is folded backwards, since a key that is distant for one query
    is distant for every later one.
    """
    folds = Folds(phi, psi, routing, mask, segments)
    first, weight = folds.first, routing.read_weight
    grads = LongRangeGrads(
        torch.empty_like(phi[:, :, first:]), torch.zeros_like(psi[:, : folds.num_distant]),
        torch.zeros_like(v[:, : folds.num_distant]), None,
        None if weight is None else torch.zeros_like(weight),
    )  # fmt: skip
    pulled = grad_y[:, :, first:]
    if decay is not None:
        pulled = pulled * _since_boundary(decay, folds, v.dtype)
    for features in folds.feature_blocks(psi, v):
        for fold, table in folds.type_tables(psi[..., features], v, decay):
            asking = _from(first, fold.queries)
            for head, by_type in enumerate(fold.by_type):
                grad, into = pulled[:, head, asking], grads.phi[:, head, asking, features]
                if grads.read_weight is None or not isinstance(by_type, SortedGroups):
                    into.copy_(by_type.read(grad, table.mT))
                    continue
                asked = phi[:, head, fold.queries, features]
                grad_phi, grad_weight = by_type.read_backward(asked, grad, table)
                into.copy_(grad_phi)
                grads.read_weight[:, head, fold.queries] += grad_weight
        _keys_backward(folds, phi, psi, v, decay, pulled, features, grads)
    if decay is None:
        return grads
    by_query = (phi[:, :, first:] * grads.phi).sum((1, -1))
    by_key = (psi[:, : folds.num_distant] * grads.psi).sum(-1)
    length = phi.shape[2]
    by_query, by_key = F.pad(by_query, (first, 0)), F.pad(by_key, (0, length - folds.num_distant))
    return grads._replace(log_decay=decay_backward(by_query, by_key, folds.num_distant))


def _keys_backward(
    folds: Folds,
    phi: Tensor,
    psi: Tensor,
    v: Tensor,
    decay: LogDecay | None,
    pulled: Tensor,
    features: slice,
    grads: LongRangeGrads,
) -> None:
    """Write the gradients of distant keys, for some features, and add those of their values."""
    grad_table: Tensor | None = None
    for fold in reversed(folds.folds):
        for head, by_type in enumerate(fold.by_type):
            asked = phi[:, head, fold.queries, features]
            grad = pulled[:, head, _from(folds.first, fold.queries)]
            grad_table = by_type.pool(asked, grad, grad_table)
        assert grad_table is not None
        grad_pooled = folds.backproject(grad_table)
        until = None if decay is None else _until_boundary(decay, fold, v.dtype)
        keys = psi[:, fold.keys, features]
        keys = keys if until is None else keys * until
        grads.v[:, fold.keys] += fold.by_profile.read(keys, grad_pooled)
        grad_psi = fold.by_profile.read(v[:, fold.keys], grad_pooled.mT)
        grads.psi[:, fold.keys, features] = grad_psi if until is None else grad_psi * until
        if decay is not None:
            grad_table *= _over_move(decay, fold, v.dtype)


def decay_backward(by_query: Tensor, by_key: Tensor, num_distant: int) -> Tensor:
    """Find the gradient of the log-gates from what queries and keys take part in, (R, T) each.

    A gate is moved by every pair of a key before it and a query not before it: all keys before it,
    but for what earlier queries saw of them. Behind the last boundary it is what later queries see.
    """
    seen = (by_key - by_query).double().cumsum(-1)
    grad = F.pad(seen[:, :-1], (1, 0))
    grad[:, num_distant:] = by_query[:, num_distant:].double().flip(-1).cumsum(-1).flip(-1)
    return grad


def _from(first: int, queries: slice) -> slice:
    """Count queries from the first that sees distant keys."""
    return slice(queries.start - first, queries.stop - first)


def _until_boundary(decay: LogDecay, fold: Fold, dtype: torch.dtype) -> Tensor:
    """What is left of each new key at the boundary, (R, t, 1)."""
    after = slice(fold.keys.start + 1, fold.keys.stop + 1)
    edge = slice(fold.boundary, fold.boundary + 1)
    return decay.between(edge, after, dtype).unsqueeze(-1)


def _over_move(decay: LogDecay, fold: Fold, dtype: torch.dtype) -> Tensor:
    """What a move of the boundary leaves of what was pooled before, (R, 1, 1, 1)."""
    return decay.between(fold.boundary, fold.keys.start, dtype).view(-1, 1, 1, 1)


def _since_boundary(decay: LogDecay, folds: Folds, dtype: torch.dtype) -> Tensor:
    """What is left of the type table at each query that reads one, (R, 1, T - first, 1)."""
    parts = [
        decay.between(
            slice(fold.queries.start + 1, fold.queries.stop + 1),
            slice(fold.boundary, fold.boundary + 1),
            dtype,
        )
        for fold in folds.folds
    ]
    return torch.cat(parts, -1)[:, None, :, None]
