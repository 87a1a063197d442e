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
from smat.layers.routing.hash import LearnedHash, WriteAddress, keyed, of_geometry
from smat.layers.routing.selectors import SELECTORS, TypeReads, point_mask
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
    >>> address, reads = routing(torch.randn(4, 64, 8))
    >>> address.profile.shape, reads.query_type.shape
    (torch.Size([4, 64, 2]), torch.Size([4, 64, 2, 4]))

    `geometry` is the one of a horizon, so that one set of parameters serves every length; or
    several, and then each has its own hash and scorer, as the paper's recall models have one for
    every length that they are trained at. The convolution is shared.

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
        self.kind = SELECTORS[selector]
        geometries = [each for _, each in keyed(geometry)]
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.hash = LearnedHash(hidden_size, num_heads, geometries, conv_width)
        self.selectors = nn.ModuleDict(
            {
                key: self.kind(hidden_size, num_heads, each, num_reads)
                for key, each in keyed(geometries)
            }
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

        `state` and `first_visible` are the hash's. Only the first `num_writers` tokens get an
        address, if it is given; the others write nothing, and where a selector wants their own
        points it is of no effect.
        """
        if num_writers is None or self.kind.needs_own_profile:
            address = self.hash(hidden, geometry, state, first_visible)
        else:
            some = self.hash(hidden[:, :num_writers], geometry, state, first_visible)
            rest = hidden.shape[1] - num_writers
            address = WriteAddress(
                F.pad(some.profile, (0, 0, 0, rest)), F.pad(some.ste_weight, (0, 0, 0, rest)),
                F.pad(some.bin_position, (0, 0, 0, 0, 0, rest)),
            )  # fmt: skip
        select = of_geometry(self.selectors, geometry)
        return Route(address, select(hidden[:, queries], address.profile[:, queries]))

    def read_mask(self, mask: SMatMask) -> SMatMask:
        """Return the mask under which the selected types are to be read."""
        return point_mask(mask) if self.kind.reads_points else mask
