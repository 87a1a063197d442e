"""Learned content routing: where tokens write and which summaries queries read (Section 3, end).

The write address (hash.py) and the selection of types (selectors.py) are learned apart; here they
share one set of parameters for each field size that a layer meets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from smat.geometry import Geometry
from smat.layers.routing.hash import HashProjection, WriteAddress
from smat.layers.routing.selectors import SELECTORS, TypeReads, point_mask
from smat.layers.short_convolution import ShortConvolution
from smat.masks import SMatMask


class Route(NamedTuple):
    """Where tokens write and what queries read."""

    address: WriteAddress
    reads: TypeReads


class LearnedRouting(nn.Module):
    """The learned routing of one layer.

    >>> import torch
    >>> mask = SMatMask(seq_len=64, vc_dim=3, chunk_size=16, field_size=3)
    >>> routing = LearnedRouting(hidden_size=8, num_heads=2, geometry=mask.geometry)
    >>> hidden = torch.randn(4, 64, 8)
    >>> address, reads = routing(hidden)
    >>> address.profile.shape, reads.query_type.shape
    (torch.Size([4, 64, 2]), torch.Size([4, 64, 2, 4]))
    >>> state = routing.conv.next_state(hidden[:, :63])  # decoding carries the last inputs alone
    >>> last = routing(hidden[:, 63:], state=state)
    >>> torch.equal(last.reads.query_type, reads.query_type[:, 63:])
    True

    `geometry` is the one of a horizon, so that one set of parameters serves every length; or
    several, and then each has its own hash and scorer, as the paper's recall models have one for
    every length that they are trained at. The convolution is shared.

    An address depends on its own token and the three before it, and is never revised. The
    convolution passes over the boundary of the local branch: a key may be written before its value.

    `selector` is "top_types" (the paper's four reads), "factored" (directions and offsets scored
    apart), "own_hyperplane" (one read, through the query's own hash point), or "own_cell" (a
    bucket). What each costs stands with its class.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        geometry: Geometry | Iterable[Geometry],
        *,
        selector: str = "top_types",
        num_reads: int = 4,
        conv_width: int = 4,
    ) -> None:
        super().__init__()
        if selector not in SELECTORS:
            raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, got {selector!r}")
        several = [geometry] if isinstance(geometry, Geometry) else list(geometry)
        if len({each.vc_dim for each in several}) != 1:
            raise ValueError(f"one VC dimension and at least one field size, got {several}")
        by_size = {each.field_size: each for each in several}
        keyed = [(str(size), each) for size, each in sorted(by_size.items())]
        self.num_heads, self.kind = num_heads, SELECTORS[selector]
        self.conv = ShortConvolution(hidden_size, conv_width, activation=False)
        self.projections = nn.ModuleDict(
            {key: HashProjection(hidden_size, num_heads, each) for key, each in keyed}
        )
        self.selectors = nn.ModuleDict(
            {key: self.kind(hidden_size, num_heads, each, num_reads) for key, each in keyed}
        )

    def forward(
        self,
        hidden: Tensor,
        geometry: Geometry | None = None,
        state: Tensor | None = None,
        first_visible: Tensor | None = None,
        queries: slice | Tensor = slice(None),
        num_writers: int | None = None,
    ) -> Route:
        """Route (B, T, hidden_size); reads are selected at the positions of `queries`.

        The geometry may stay out if there is only one. `state` (B, 3, hidden_size) holds the inputs
        before these, and `first_visible` (1, T) keeps packed sequences apart. Only the first
        `num_writers` tokens get an address, if it is given; the others write nothing, and where a
        selector wants their own points it is of no effect.
        """
        length = hidden.shape[1]
        if num_writers is None or self.kind.needs_own_profile:
            num_writers = length
        key = self._key(geometry)
        address = self.projections[key](self.conv(hidden[:, :num_writers], state, first_visible))
        if num_writers < length:
            rest = length - num_writers
            address = WriteAddress(
                F.pad(address.profile, (0, 0, 0, rest)), F.pad(address.ste_weight, (0, 0, 0, rest)),
                F.pad(address.bin_position, (0, 0, 0, 0, 0, rest)),
            )  # fmt: skip
        reads = self.selectors[key](hidden[:, queries], address.profile[:, queries])
        return Route(address, reads)

    def _key(self, geometry: Geometry | None) -> str:
        if geometry is None and len(self.selectors) == 1:
            return next(iter(self.selectors))
        key = "" if geometry is None else str(geometry.field_size)
        if key not in self.selectors:
            raise ValueError(
                f"parameters exist for the field sizes {', '.join(self.selectors)}, "
                f"got {'no geometry' if geometry is None else f'field size {key}'}"
            )
        return key

    def read_mask(self, mask: SMatMask) -> SMatMask:
        """Return the mask under which the selected types are to be read."""
        return point_mask(mask) if self.kind.reads_points else mask
