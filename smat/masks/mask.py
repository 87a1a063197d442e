"""Say who sees whom: the SMat mask as a recipe of integers (Section 3, equation 2)."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from smat.geometry import Geometry
from smat.geometry.scaling import default_num_distant
from smat.masks.assignment import positional_profile, positional_type
from smat.masks.boundary import BoundarySchedule, KeptBoundary, RebuiltBoundary, Segment
from smat.masks.boundary import schedule_from_dict
from smat.masks.counting import count_on_hyperplane
from smat.masks.dense import decay_between, dense_support


class SMatWarning(UserWarning):
    """A mask is valid, but a property that the paper proves for long sequences is not assured."""


@dataclass(frozen=True)
class SMatMask:
    """The causal mask M^(d) of a horizon of `seq_len` tokens.

    >>> mask = SMatMask(seq_len=8, vc_dim=1, chunk_size=2)
    >>> mask.num_distant, mask.num_recent
    (4, 4)
    >>> bool((mask.dense() == torch.ones(8, 8).tril().bool()).all())
    True
    >>> print(SMatMask(seq_len=1024, vc_dim=3).describe())
    SMatMask: T = 1024, d = 3, q = 11, n = 512, c = 64, boundary = rebuilt()

    A query sees its own prefix among the recent keys, and a distant key if the key's profile (a
    point) lies on the query's type (a hyperplane):

        M = [[L_n, 0], [G, L_m]],    G[i, j] = 1 if prof(j) in H_type(i)

    Paper: T = `seq_len`, d = `vc_dim`, c = `chunk_size`, q = `field_size` (None: the smallest prime
    with q^d >= n), n(t) = `boundary` (None: n = c floor(T / 2c)), n = `num_distant`,
    m = `num_recent`, P and B = `geometry.num_profiles` and `geometry.num_types`.

    The geometry belongs to the boundary that never moves, and otherwise to the horizon. A length
    without a distant block gives the plain causal mask.
    """

    seq_len: int
    vc_dim: int
    chunk_size: int = 64
    field_size: int | None = None
    boundary: BoundarySchedule = None  # type: ignore[assignment]
    _derived: InitVar[bool] = field(default=False, kw_only=True)

    def __post_init__(self, _derived: bool) -> None:
        if self.boundary is None:
            object.__setattr__(self, "boundary", RebuiltBoundary())
        for name in ("seq_len", "vc_dim", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, but it is {getattr(self, name)}")
        _ = self.geometry  # refuses a field size that is not prime
        if _derived:
            return
        if isinstance(self.boundary, KeptBoundary) and self.boundary.num_distant > self.seq_len:
            raise ValueError(
                f"boundary {self.boundary.describe()} lies past the horizon seq_len = "
                f"{self.seq_len}; keep at most {self.seq_len} keys distant"
            )
        is_block_mask = self.num_distant > 0 and not self.boundary.moves
        if is_block_mask and not self.guarantees_vc_dim:
            _warn_once(self.seq_len, self.vc_dim, self.num_distant, self.geometry)

    @cached_property
    def schedule(self) -> BoundarySchedule:
        """The boundary as a function of the position alone."""
        return self.boundary.resolve(self.seq_len, self.chunk_size)

    @cached_property
    def geometry(self) -> Geometry:
        """The points and hyperplanes that profiles and types number."""
        if self.field_size is not None:
            return Geometry(vc_dim=self.vc_dim, field_size=self.field_size)
        moves = self.boundary.moves
        half = default_num_distant(self.seq_len, self.chunk_size)
        return Geometry.for_distant(half if moves else self.num_distant, self.vc_dim)

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
        """Whether the theorem's proof applies: a block mask with P <= n and 2B <= m.

        >>> SMatMask(1024, 4).guarantees_vc_dim, SMatMask(1024, 3, boundary=KeptBoundary(0)).guarantees_vc_dim
        (True, False)

        At d = 1 the mask is L_T under every schedule, and two tokens are enough.
        """
        if self.vc_dim == 1:
            return self.seq_len >= 2
        enough_keys = self.geometry.num_profiles <= self.num_distant
        enough_queries = 2 * self.geometry.num_types <= self.num_recent
        return not self.boundary.moves and enough_keys and enough_queries

    def segments(self, length: int | None = None) -> tuple[Segment, ...]:
        """Cut the first `length` queries where the boundary changes.

        >>> SMatMask(seq_len=64, vc_dim=2, chunk_size=16).segments(40)
        (Segment(start=0, stop=32, boundary=0), Segment(start=32, stop=40, boundary=32))
        """
        return self.schedule.segments(self.check_length(length))

    def boundaries(self, length: int | None = None, device: torch.device | None = None) -> Tensor:
        """Return n(t) of the first `length` queries, `(length,)`."""
        segments = torch.tensor(self.segments(length), device=device)
        return segments[:, 2].repeat_interleave(segments[:, 1] - segments[:, 0])

    def check_length(self, length: int | None = None) -> int:
        """Return the length, the horizon if it is None; refuse one that the mask does not reach."""
        length = self.seq_len if length is None else length
        if length < 1:
            raise ValueError(f"a sequence has at least one token, but its length is {length}")
        if length > self.seq_len and not self.boundary.horizon_free:
            raise ValueError(
                f"length {length} is past the horizon seq_len = {self.seq_len} of a mask with "
                f"T = {self.seq_len}, d = {self.vc_dim}, n = {self.num_distant}; "
                f"use mask.for_length({length}), or a boundary that needs no horizon"
            )
        return length

    def for_length(self, seq_len: int) -> SMatMask:
        """Return the same recipe for another length.

        >>> SMatMask(1024, 3).for_length(256).describe()
        'SMatMask: T = 256, d = 3, q = 7, n = 128, c = 64, boundary = rebuilt()'

        A boundary that moves keeps the geometry of its horizon at every length, so that shorter
        masks are leading blocks of longer ones; a given field size is kept as well.
        """
        field_size = self.geometry.field_size if self.boundary.moves else self.field_size
        return replace(self, seq_len=seq_len, field_size=field_size, _derived=True)

    def profile(self, positions: Tensor) -> Tensor:
        """Return the positional profile of the keys at 0-based positions."""
        return positional_profile(self.geometry, positions)

    def query_type(self, positions: Tensor) -> Tensor:
        """Return the positional type of the queries at 0-based positions.

        Recent queries are counted from the boundary if it never moves, else from the start.
        """
        first = 0 if self.boundary.moves else self.num_distant
        return positional_type(self.geometry, positions - first)
