"""Learned content routing: where tokens write and which summaries queries read (Section 3, end).

The write address (routing_hash.py) and the selection of types (selectors.py) are learned apart;
here they share one set of parameters for each field size that a layer meets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from smat.geometry import Geometry
from smat.layers.routing_hash import LearnedHash, WriteAddress, keyed, of_geometry
from smat.layers.selectors import (
    FactoredTopTypes,
    OwnCell,
    OwnHyperplane,
    TopTypes,
    TypeReads,
    point_mask,
)
from smat.masks import SMatMask

OWN_POINT = ("own_hyperplane", "own_cell")  # what they read depends on the query's own point
SELECTORS = ("top_types", "factored", "own_hyperplane", "own_cell")


class Route(NamedTuple):
    """Where tokens write and what queries read."""

    address: WriteAddress
    reads: TypeReads


class LearnedRouting(nn.Module):
    """The learned routing of one layer.

    >>> mask = SMatMask(seq_len=64, vc_dim=3, chunk_size=16, field_size=3)
    >>> routing = LearnedRouting(hidden_size=8, num_heads=2, geometry=mask.geometry)
    >>> import torch
    >>> hidden = torch.randn(4, 64, 8)
    >>> address, reads = routing(hidden)
    >>> address.profile.shape, reads.query_type.shape
    (torch.Size([4, 64, 2]), torch.Size([4, 64, 2, 4]))
    >>> state = routing.hash.empty_state(hidden)
    >>> for token in hidden.unbind(1):
    ...     route, state = routing.step(token, state)
    >>> torch.equal(route.address.profile, address.profile[:, -1])
    True

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
        geometries = [each for _, each in keyed(geometry)]
        self.hidden_size, self.num_heads, self.selector = hidden_size, num_heads, selector
        self.hash = LearnedHash(hidden_size, num_heads, geometries, conv_width)
        self.selectors = nn.ModuleDict(
            {
                key: make_selector(selector, hidden_size, num_heads, each, num_reads)
                for key, each in keyed(geometries)
            }
        )

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        for module in (self.hash, *self.selectors.values()):
            module.reset_parameters()  # type: ignore[operator]

    def forward(
        self,
        hidden: Tensor,
        geometry: Geometry | None = None,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: Tensor | None = None,
        queries: slice | Tensor = slice(None),
        num_writers: int | None = None,
    ) -> Route:
        """Route (B, T, hidden_size); reads are selected at the positions of `queries`.

        `state` is the hash's, of the tokens before. Only the first `num_writers` tokens get an
        address, if it is given; the others write nothing, and where a selector wants their own
        points it is of no effect.
        """
        select = of_geometry(self.selectors, geometry)
        if num_writers is None or self.selector in OWN_POINT:
            address = self.hash(hidden, geometry, attention_mask, cu_seqlens, state)
        else:
            address = self.hash(hidden[:, :num_writers], geometry, None, cu_seqlens, state)
            rest = hidden.shape[1] - address.profile.shape[1]
            address = WriteAddress(
                F.pad(address.profile, (0, 0, 0, rest)), F.pad(address.ste_weight, (0, 0, 0, rest)),
                F.pad(address.bin_position, (0, 0, 0, 0, 0, rest)),
            )  # fmt: skip
        return Route(address, select(hidden[:, queries], address.profile[:, queries]))

    def step(
        self, hidden_t: Tensor, state: Tensor, geometry: Geometry | None = None
    ) -> tuple[Route, Tensor]:
        """Route one token (B, hidden_size)."""
        address, state = self.hash.step(hidden_t, state, geometry)
        reads = of_geometry(self.selectors, geometry)(hidden_t, address.profile)
        return Route(address, reads), state

    def read_mask(self, mask: SMatMask) -> SMatMask:
        """Return the mask under which the selected types are to be read."""
        return point_mask(mask) if self.selector == "own_cell" else mask


def make_selector(
    name: str, hidden_size: int, num_heads: int, geometry: Geometry, num_reads: int = 4
) -> nn.Module:
    """Make a selector by its name.

    >>> make_selector("own_cell", 8, 2, Geometry(3, 5))
    OwnCell()
    """
    if name == "top_types":
        return TopTypes(hidden_size, num_heads, geometry, num_reads)
    if name == "factored":
        return FactoredTopTypes(hidden_size, num_heads, geometry, num_reads)
    if name == "own_hyperplane":
        return OwnHyperplane(hidden_size, num_heads, geometry)
    if name == "own_cell":
        return OwnCell()
    raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, got {name!r}")
