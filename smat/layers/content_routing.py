"""Learned content routing for SMat-Attention itself: hashed writes, k weighted reads a query."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.layers.balance import routing_balance_loss
from smat.layers.hashed_routing import Assignment
from smat.layers.routing import LearnedRouting
from smat.layers.span import Span
from smat.masks import SMatMask
from smat.ops import SMatState, smat_attention, smat_attention_at


class ContentRouting(nn.Module):
    """Route tokens by what the layer's input says, with any selector of `LearnedRouting`.

    >>> mask = SMatMask(64, vc_dim=3, chunk_size=16, field_size=3)
    >>> routing = ContentRouting(LearnedRouting(8, num_heads=2, geometry=mask.geometry))
    >>> span = Span(1, 64, torch.device("cpu"))
    >>> assignment, _ = routing(torch.randn(1, 64, 8), mask, span)
    >>> assignment.profile.shape, assignment.query_type.shape
    (torch.Size([1, 64, 2]), torch.Size([1, 64, 2, 4]))

    After a call that begins sequences `balance_loss` holds the loss of the hash, for the training
    loop to add.
    """

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


def attend_reads(
    q: Tensor, k: Tensor, v: Tensor, mask: SMatMask, assignment: Assignment, span: Span,
    *, normalize: bool, **options: Any,
) -> tuple[Tensor, SMatState | None]:  # fmt: skip
    """Attend where every query reads several types, (B, T, H, k), with weights of their own.

    y = phi . (R + sum over reads of w U[type]), divided by its last column: the weights count in
    the normaliser too. The reads of a query are heads of queries that share one head of keys.
    """
    profile, query_type, write_weight, read_weight = assignment
    assert query_type is not None
    assert read_weight is not None
    wide = torch.promote_types(v.dtype, torch.float32)
    values = F.pad(v, (0, 1), value=1.0) if normalize else v
    queries, keys, values = q.to(wide), k.to(wide), values.to(wide)
    common: dict[str, Any] = {
        **options, "normalize": False, "attention_mask": span.real, "cu_seqlens": span.cu_seqlens,
    }  # fmt: skip
    num_heads, num_reads = query_type.shape[2:]
    attend: Any = smat_attention
    if span.rows is not None:
        attend, _ = partial(smat_attention_at, positions=span.rows), common.pop("attention_mask")
    local = attend(queries, keys, values, mask, branch="causal", **common)
    asked = queries.repeat_interleave(num_reads, 2)
    far = attend(
        asked, keys, values, mask, query_type=query_type.flatten(2), profile=profile,
        write_weight=write_weight, branch="long_range", **common,
    )  # fmt: skip
    local, far = (x if isinstance(x, Tensor) else x[0] for x in (local, far))
    weighted = far.unflatten(2, (num_heads, num_reads)) * read_weight.unsqueeze(-1).to(wide)
    y = local + weighted.sum(3)
    if normalize:
        total = y[..., -1:]
        y = y[..., :-1] / torch.where(total == 0, 1, total)
    state = None
    if span.use_cache:
        state = SMatState.after(
            k, v, mask, profile=profile, write_weight=write_weight, normalize=normalize,
            lengths=span.lengths, cu_seqlens=span.cu_seqlens, num_query_heads=num_heads, **options,
        )  # fmt: skip
    return y.to(v.dtype), state
