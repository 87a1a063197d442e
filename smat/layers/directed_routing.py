"""Routing by a hash of token ids with a learned direction: the cell is fixed, the plane is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from smat.geometry import Geometry
from smat.layers.hashed_routing import Assignment, HashedRouting
from smat.layers.span import Span
from smat.masks import SMatMask


class DirectedRouting(HashedRouting):
    """`HashedRouting` whose queries choose the direction of their hyperplane by a linear map.

    >>> mask = SMatMask(64, vc_dim=3, chunk_size=16, field_size=3)
    >>> routing = DirectedRouting(8, mask.geometry, vocab_size=16, num_heads=2)
    >>> ids = torch.tensor([[5, 9, 5, 7]])
    >>> span = Span(1, 4, ids.device, extras={"token_ids": ids})
    >>> assignment, _ = routing(torch.randn(1, 4, 8), mask, span)
    >>> assignment.query_type.shape, bool((assignment.read_weight == 1).all())
    (torch.Size([1, 4, 2, 1]), True)

    The direction is the argmax of A learned scores a head, the offset that of the token's own cell.
    The read weight is 1, and its gradient that of the chosen direction's softmax probability
    (straight-through), so that directions which help become more probable.
    """

    looks_at_states = True

    def __init__(
        self,
        hidden_size: int,
        geometry: Geometry,
        *,
        vocab_size: int,
        num_heads: int,
        **hashed: Any,
    ) -> None:
        super().__init__(vocab_size, num_heads, **hashed)
        self.score = nn.Linear(hidden_size, num_heads * geometry.num_directions)

    def forward(self, x: Tensor, mask: SMatMask, span: Span) -> tuple[Assignment, Tensor | None]:
        """Route the tokens of a span by their ``token_ids`` and hidden states."""
        scores = self.score(x).unflatten(-1, (self.num_heads, -1))
        chance, direction = torch.max(scores.softmax(-1), -1)
        told = replace(span, extras={**span.extras, "query_direction": direction})
        assignment, state = super().forward(x, mask, told)
        assert assignment.query_type is not None
        if span.rows is not None:
            chance = chance[:, span.rows]
        weight = 1 + (chance - chance.detach())  # exactly 1
        return assignment._replace(
            query_type=assignment.query_type.unsqueeze(-1), read_weight=weight.unsqueeze(-1)
        ), state
