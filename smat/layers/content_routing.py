"""Learned content routing for SMat-Attention itself: hashed writes, k weighted reads a query."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from smat.layers.balance import routing_balance_loss
from smat.layers.hashed_routing import Assignment
from smat.layers.routing import LearnedRouting
from smat.layers.span import Span
from smat.masks import SMatMask


class ContentRouting(nn.Module):
    """Route tokens by what the layer's input says, with any selector of `LearnedRouting`.

    >>> import torch
    >>> mask = SMatMask(64, vc_dim=3, chunk_size=16, field_size=3)
    >>> routing = ContentRouting(LearnedRouting(8, num_heads=2, geometry=mask.geometry))
    >>> span = Span(1, 64, torch.device("cpu"))
    >>> assignment, _ = routing(torch.randn(1, 64, 8), mask, span)
    >>> assignment.profile.shape, assignment.query_type.shape
    (torch.Size([1, 64, 2]), torch.Size([1, 64, 2, 4]))

    After a call that begins sequences `balance_loss` holds the loss of the hash, for the training
    loop to add.
    """

    looks_at_states = True

    def __init__(self, learned: LearnedRouting) -> None:
        super().__init__()
        self.learned = learned
        self.balance_loss: Tensor | None = None

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self.learned.reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the last loss behind where a layer is copied or saved: it belongs to a graph."""
        return {**self.__dict__, "balance_loss": None}

    def read_mask(self, mask: SMatMask) -> SMatMask:
        """Return the mask under which the types are read."""
        return self.learned.read_mask(mask)

    def forward(self, x: Tensor, mask: SMatMask, span: Span) -> tuple[Assignment, Tensor | None]:
        """Route the tokens of a span; the state is that of the hash's convolution."""
        past = span.part("routing")
        queries = slice(None) if span.rows is None else span.rows
        address, reads = self.learned(
            x, mask.geometry, None, span.cu_seqlens, past, queries=queries
        )
        if past is None:
            self.balance_loss = routing_balance_loss(address, mask, span.real, span.cu_seqlens)
        state = None
        if span.use_cache:
            state = self.learned.hash.next_state(x, past, span.real, span.cu_seqlens)
        return Assignment(
            address.profile, reads.query_type, address.ste_weight, reads.read_weight
        ), state
