"""Say who sees whom: the SMat mask as a recipe of integers (Section 3, equation 2)."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from smat.geometry import Geometry
from smat.geometry.field import check_index, check_integer
from smat.masks.boundary import BoundarySchedule, RebuiltBoundary, Segment, schedule_from_dict


class SMatWarning(UserWarning):
    """A mask is valid, but something that the paper says of long sequences does not hold."""


@dataclass(frozen=True, init=False)
class SMatMask:
    """The causal mask M^(d) of a horizon of `seq_len` tokens.

    >>> mask = SMatMask(seq_len=1024, vc_dim=3)
    >>> mask.describe()
    'SMatMask: T = 1024, d = 3, q = 11, n = 512, c = 64, boundary = rebuilt()'
    >>> mask.dense().shape
    torch.Size([1024, 1024])

    A query sees its own prefix among the recent keys, and a distant key if the key's profile (a
    point) lies on the query's type (a hyperplane):

        M = [[L_n, 0], [G, L_m]],    G[i, j] = 1 if prof(j) in H_type(i)

    Paper: T = `seq_len`, d = `vc_dim`, c = `chunk_size`, q = `field_size` (None: the smallest prime
    with q^d >= n), n(t) = `boundary` (None: n = c floor(T / 2c)), n = `num_distant`,
    m = `num_recent`, P and B = `geometry.num_profiles` and `geometry.num_types`.

    The geometry belongs to the boundary if that never moves, else to the horizon. A length without
    a distant block gives the plain causal mask.
    """

    seq_len: int
    vc_dim: int
    chunk_size: int
    field_size: int | None
    boundary: BoundarySchedule

    def __init__(
        self,
        seq_len: int,
        vc_dim: int,
        chunk_size: int = 64,
        field_size: int | None = None,
        boundary: BoundarySchedule | None = None,
        *,
        _derived: bool = False,  # from another mask: of any length, and without a warning
    ) -> None:
        boundary = RebuiltBoundary() if boundary is None else boundary
        if not isinstance(boundary, BoundarySchedule):
            raise ValueError(f"boundary must be a schedule or None, but it is {boundary!r}")
        write = object.__setattr__  # the mask is frozen
        write(self, "seq_len", check_integer("seq_len", seq_len, least=1))
        write(self, "vc_dim", check_integer("vc_dim", vc_dim, least=1))
        write(self, "chunk_size", check_integer("chunk_size", chunk_size, least=1))
        write(self, "boundary", boundary)
        write(self, "field_size", field_size)
        write(self, "field_size", None if field_size is None else self.geometry.field_size)
        _ = (
            self.geometry,
            self.recipe,
            self.anchor,
        )  # a compiler that meets the mask finds them written
        if not _derived:
            self._check_horizon()

    def _check_horizon(self) -> None:
        """Refuse a boundary past the horizon; say what does not hold of a mask so short."""
        space, c, n, horizon = self.geometry, self.chunk_size, self.num_distant, self.seq_len
        if self.schedule.anchor > horizon:
            raise ValueError(f"{self.boundary.describe()} lies past the horizon T = {horizon}")
        if n > 0 and not self.boundary.moves and not self.guarantees_vc_dim:
            _warn_once(
                f"VC = {self.vc_dim} is not guaranteed at T = {horizon}, n = {n}, m = "
                f"{self.num_recent}: q = {space.field_size} has P = {space.num_profiles} and B = "
                f"{space.num_types}, but the proof needs P <= n and 2B <= m. It is causal all "
                "the same; a longer sequence, a smaller vc_dim or a smaller field_size would help."
            )
        # A single token has no past whatever d is, and decoding may go past a free horizon.
        if n == 0 and self.vc_dim > 1 and horizon > 1 and not self.boundary.horizon_free:
            _warn_once(
                f"vc_dim = {self.vc_dim} is without effect at T = {horizon}: with chunks of "
                f"c = {c} tokens nothing is distant below T = 2c = {2 * c}"
            )

    @cached_property
    def recipe(self) -> str:
        """The mask as one string of JSON, which operators can take and compilers guard on."""
        return json.dumps(self.to_dict())

    @cached_property
    def schedule(self) -> BoundarySchedule:
        """The boundary as a function of the position alone."""
        return self.boundary.resolve(self.seq_len, self.chunk_size)

    @cached_property
    def geometry(self) -> Geometry:
        """The points and hyperplanes that profiles and types number."""
        if self.field_size is not None:
            return Geometry(vc_dim=self.vc_dim, field_size=self.field_size)
        fixed = RebuiltBoundary() if self.boundary.moves else self.boundary
        anchor = fixed.resolve(self.seq_len, self.chunk_size).anchor
        return Geometry.for_distant(anchor, self.vc_dim)

    @cached_property
    def anchor(self) -> int:
        """The position from which positional types are counted."""
        return self.schedule.anchor

    @cached_property
    def num_distant(self) -> int:
        """The number of distant keys of the last query."""
        return self.schedule.boundary_at(self.seq_len - 1)

    @property
    def num_recent(self) -> int:
        """The number of recent keys of the last query."""
        return self.seq_len - self.num_distant

    @property
    def guarantees_vc_dim(self) -> bool:
        """Whether VC = d is proved for this mask.

        >>> SMatMask(1024, 4).guarantees_vc_dim, SMatMask(1024, 4).for_length(64).guarantees_vc_dim
        (True, False)

        The proof asks for P <= n, so that every basis point is some key's profile, and for 2B <= m,
        so that every hyperplane is some query's type both before and after one recent key. Where
        the boundary moves nothing is proved: such masks can shatter more than d columns.
        """
        if self.vc_dim == 1:
            return self.seq_len >= 2
        fits = self.geometry.num_profiles <= self.num_distant
        return not self.boundary.moves and fits and 2 * self.geometry.num_types <= self.num_recent

    def segments(self, length: int | None = None) -> tuple[Segment, ...]:
        """Cut the first `length` queries where the boundary changes.

        >>> SMatMask(seq_len=64, vc_dim=2, chunk_size=16).segments(40)
        (Segment(start=0, stop=32, boundary=0), Segment(start=32, stop=40, boundary=32))
        """
        length = self.check_length(length)
        if torch.compiler.is_compiling():  # which warns of caches
            return self.schedule.segments(length)
        return _segments(self.schedule, length)

    def boundaries(
        self, length: int | None = None, device: torch.device | str | None = None, start: int = 0
    ) -> Tensor:
        """Return n(t) of the first `length` queries, without those before `start`."""
        found = self.segments(length)
        if start:
            found = self.schedule.segments(self.check_length(length), start)
        segments = torch.tensor(found, device=device)
        return segments[:, 2].repeat_interleave(segments[:, 1] - segments[:, 0])

    def check_length(self, length: int | None = None) -> int:
        """Return the length, the horizon if it is None; refuse one that the mask does not reach."""
        length = self.seq_len if length is None else length
        if length < 1:
            raise ValueError(f"a sequence has at least one token, but its length is {length}")
        if length > self.seq_len and not self.boundary.horizon_free:
            raise ValueError(
                f"length {length} is past the horizon of {self.describe()}; "
                f"use mask.for_length({length}), or a boundary that needs no horizon"
            )
        return length

    def for_length(self, seq_len: int) -> SMatMask:
        """Return the same recipe for another length.

        >>> SMatMask(1024, 3).for_length(256).describe()
        'SMatMask: T = 256, d = 3, q = 7, n = 128, c = 64, boundary = rebuilt()'

        A boundary that moves keeps the geometry of its horizon, so that shorter masks are leading
        blocks of longer ones; a given field size is kept as well.
        """
        field_size = self.geometry.field_size if self.boundary.moves else self.field_size
        recipe = (self.vc_dim, self.chunk_size, field_size, self.boundary)
        return SMatMask(seq_len, *recipe, _derived=True)

    def profile(self, positions: Tensor) -> Tensor:
        """Return the positional profile of the keys at 0-based positions: prof(j) = j mod P."""
        return (positions.long() + self.schedule.offset) % self.geometry.num_profiles

    def query_type(self, positions: Tensor) -> Tensor:
        """Return the positional type of the queries at 0-based positions: type(i) = i mod B.

        The paper's i counts recent queries, from 1: behind a boundary that never moves, else from
        the start of the sequence.
        """
        return (positions.long() - self.anchor + 1) % self.geometry.num_types

    def dense(
        self,
        length: int | None = None,
        *,
        profile: Tensor | None = None,
        query_type: Tensor | None = None,
        log_decay: Tensor | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Write the mask out: `(T, T)` bool, or `(B, H, T, T)` if an argument is `(B, T, H)`.

        M[t, j] = 1 for n(t) <= j <= t, C[type(t), prof(j)] for j < n(t), and 0 for j > t (0-based):

        >>> SMatMask(seq_len=8, vc_dim=2, chunk_size=2, field_size=2).dense(6)[4:].int()
        tensor([[0, 1, 0, 1, 1, 0],
                [1, 0, 1, 0, 1, 1]], dtype=torch.int32)

        `profile` and `query_type` replace the positional assignment. `log_decay` <= 0 gives the
        gated mask: exp(lambda_t - lambda_j) on the support, with lambda its running sum.
        """
        check_index("profile", profile, self.geometry.num_profiles)
        check_index("query_type", query_type, self.geometry.num_types)
        given = {"profile": profile, "query_type": query_type, "log_decay": log_decay}
        for name, values in given.items():
            if values is None:
                continue
            if values.ndim != 3 or length not in (None, values.shape[1]):
                expected = f"(B, {length or 'T'}, H)"
                raise ValueError(f"{name} must be {expected}, but it is {tuple(values.shape)}")
            length, device = values.shape[1], values.device if device is None else device
        boundaries = self.boundaries(length, device)
        position = torch.arange(len(boundaries), device=device)
        keys, queries = (
            own(position) if values is None else values.to(position).movedim(-1, 1)
            for own, values in ((self.profile, profile), (self.query_type, query_type))
        )
        distant = position < boundaries[:, None]
        on_hyperplane = self.geometry.incidence(device)[queries[..., :, None], keys[..., None, :]]
        support = (on_hyperplane | ~distant) & (position <= position[:, None])
        if log_decay is None:
            return support if dtype is None else support.to(dtype)
        if not bool((log_decay <= 0).all()):
            raise ValueError(f"log_decay must be 0 or less, but its largest is {log_decay.max()}")
        wide = log_decay.to(device, torch.promote_types(log_decay.dtype, torch.float32))
        return (support * _decay_between(wide.movedim(-1, 1))).to(dtype or log_decay.dtype)

    def describe(self) -> str:
        """Return the recipe on one line, in the paper's symbols."""
        return (
            f"SMatMask: T = {self.seq_len}, d = {self.vc_dim}, q = {self.geometry.field_size}, "
            f"n = {self.num_distant}, c = {self.chunk_size}, boundary = {self.boundary.describe()}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `SMatMask.from_dict` turns back into this mask."""
        return {**asdict(self), "boundary": self.boundary.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SMatMask:
        """Rebuild a mask from `mask.to_dict()`."""
        names = [data_field.name for data_field in fields(cls)]
        if set(data) != set(names):
            raise ValueError(f"a mask is saved as {names}, but got {list(data)}")
        plain = {**data, "boundary": schedule_from_dict(data["boundary"])}
        return cls(**plain, _derived=True)


@lru_cache(maxsize=32, typed=True)
def _segments(schedule: BoundarySchedule, length: int) -> tuple[Segment, ...]:
    return schedule.segments(length)


def _decay_between(log_decay: Tensor) -> Tensor:
    """Multiply the gates between each key and each later query: `(..., T)` -> `(..., T, T)`.

    A gate of -inf forgets every earlier key; it is counted apart, since inf - inf is no number.
    """
    is_reset = torch.isneginf(log_decay)
    num_resets = is_reset.long().cumsum(-1)
    total = log_decay.masked_fill(is_reset, 0.0).cumsum(-1)
    # Above the diagonal the difference is positive: its exponential could overflow, and an infinity
    # that is masked away still spoils the gradient.
    difference = (total[..., :, None] - total[..., None, :]).clamp(max=0.0)
    was_reset = num_resets[..., :, None] != num_resets[..., None, :]
    return difference.exp().masked_fill(was_reset, 0.0).tril()


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, SMatWarning, stacklevel=4)  # the caller of SMatMask
