"""What every memory of distant tokens has: learned routing, a read gate, and k reads a query.

A query t behind the boundary adds lambda_t q_t' sum_h R_th U_h to what its local branch found
(Section 3, recurrent architectures): U the type table, R the read weights, lambda the read gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from smat.layers.balance import routing_balance_loss
from smat.layers.lengths import kept_mask, mask_of_length
from smat.layers.routing import LearnedRouting, Route
from smat.layers.selectors import TypeReads
from smat.layers.span import Span
from smat.masks import SMatMask
from smat.ops import smat_attention_at

GATE_LOGIT = -2.197  # gates begin at about 0.1


class SigmoidGate(nn.Module):
    """A gate in (0, 1) for every token and head, about 0.1 before training.

    >>> gate = SigmoidGate(hidden_size=64, num_heads=2, head_logit=True)
    >>> gate(torch.zeros(1, 64))
    tensor([[0.1000, 0.1000]], grad_fn=<SigmoidBackward0>)

    sigmoid(W h + b), plus a logit for every head: the read gate has one beside its bias.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_logit: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, num_heads)
        self.head_logit = nn.Parameter(torch.empty(num_heads)) if head_logit else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the map as torch does, and put the bias where the gate is nearly shut."""
        self.linear.reset_parameters()
        nn.init.constant_(self.linear.bias, GATE_LOGIT)
        if self.head_logit is not None:
            nn.init.zeros_(self.head_logit)

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., hidden_size) -> (..., H)."""
        logit = self.linear(hidden)
        return torch.sigmoid(logit if self.head_logit is None else logit + self.head_logit)


class RoutedMemory(nn.Module):
    """The part of a memory that does not depend on how profiles are updated.

    >>> mask = SMatMask(64, vc_dim=3, chunk_size=16, field_size=3)
    >>> memory = RoutedMemory(hidden_size=8, num_heads=2, mask=mask, selector="factored")
    >>> memory.mask.describe()
    'SMatMask: T = 64, d = 3, q = 3, n = 32, c = 16, boundary = rebuilt()'

    One mask fixes the geometry for all lengths; `other_masks` add those of other lengths, each
    field size with a hash and a scorer of its own. A call picks one of them by ``mask=`` among the
    extras of its span; a memory that was made `for_lengths` picks by the length of the call.

    After every call `balance_loss` holds the loss of the hash, with its gradient, for the training
    loop to add: `sum_balance_losses`.
    """

    balance_loss: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mask: SMatMask,
        *,
        other_masks: Sequence[SMatMask] = (),
        selector: str = "top_types",
        num_reads: int = 4,
        conv_width: int = 4,
    ) -> None:
        super().__init__()
        self.mask = mask
        self.routing = LearnedRouting(
            hidden_size, num_heads, [each.geometry for each in (mask, *other_masks)],
            selector=selector, num_reads=num_reads, conv_width=conv_width,
        )  # fmt: skip
        self.read_gate = SigmoidGate(hidden_size, num_heads, head_logit=True)
        self.mask_by_length: dict[int, SMatMask] = {}
        self.balance_loss = None

    @classmethod
    def for_lengths(
        cls,
        hidden_size: int,
        num_heads: int,
        *,
        vc_dim: int,
        lengths: Iterable[int],
        chunk_size: int | None = None,
        **routing: Any,
    ) -> Self:
        """Make a memory with a geometry for each length, as the paper's recall models have.

        >>> memory = RoutedMemory.for_lengths(8, 2, vc_dim=2, lengths=[64, 128, 256])
        >>> list(memory.routing.selectors)  # one hash and one scorer for each field size
        ['7', '11', '13']

        Half of a length is distant. A call takes the geometry of the shortest length that holds it
        (padding included), the longest one past all; decoding keeps to the one it began with.
        """
        masks = {each: kept_mask(each, vc_dim, chunk_size) for each in sorted(set(lengths))}
        if not masks:
            raise ValueError("a memory needs at least one length, got none")
        *others, longest = masks.values()
        memory = cls(hidden_size, num_heads, longest, other_masks=others, **routing)
        memory.mask_by_length = masks
        return memory

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        self.routing.reset_parameters()
        self.read_gate.reset_parameters()

    def __getstate__(self) -> dict[str, Any]:
        """Leave the last loss behind where a memory is copied or saved: it belongs to a graph."""
        return {**self.__dict__, "balance_loss": None}

    def mask_of(self, span: Span) -> SMatMask:
        """Return the mask of a call that begins sequences; a state knows its own."""
        mask = span.extras.get("mask")
        if mask is not None or not self.mask_by_length:
            return self.mask if mask is None else mask
        if span.cu_seqlens is not None and len(self.mask_by_length) > 1:
            raise ValueError(
                "packed sequences would share one geometry of those for lengths "
                f"{list(self.mask_by_length)}; name one by mask=, or pad the sequences"
            )
        return mask_of_length(self.mask_by_length, span.length)

    def route(
        self, hidden: Tensor, mask: SMatMask, span: Span, state: Tensor | None, first: int = 0
    ) -> Route:
        """Route the tokens of a span; reads from `first` on, their weights times the read gate."""
        num_writers = None
        if state is None and span.cu_seqlens is None and not span.use_cache:
            num_writers = mask.segments(span.length)[-1].boundary  # the others are never distant
        address, reads = self.routing(
            hidden, mask.geometry, None, span.cu_seqlens, state, slice(first, None), num_writers
        )
        gate = self.read_gate(hidden[:, first:]).unsqueeze(-1)
        if state is None:
            loss = routing_balance_loss(address, mask, span.real, span.cu_seqlens)
            self.balance_loss = loss
        return Route(address, TypeReads(reads.query_type, reads.read_weight * gate))

    def next_hash_state(self, hidden: Tensor, span: Span, state: Tensor | None) -> Tensor:
        """Return the state of the hash after a span."""
        return self.routing.hash.next_state(hidden, state, span.real, span.cu_seqlens)


def whole_span(hidden_states: Tensor) -> Span:
    """Return the span of new sequences (B, T, ...), all of them whole."""
    batch, length = hidden_states.shape[:2]
    return Span(batch, length, hidden_states.device)


def first_reader(mask: SMatMask, span: Span) -> int:
    """Return the first query that sees distant keys, T if none does; 0 if rows may differ."""
    if span.cu_seqlens is not None:
        return 0
    segments = mask.segments(span.length)
    return next((each.start for each in segments if each.boundary > 0), span.length)


def read_types(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SMatMask,
    reads: TypeReads,
    first: int,
    span: Span,
    *,
    profile: Tensor,
    write_weight: Tensor,
    log_decay: Tensor | None = None,
) -> Tensor:
    """Pool by profile, tabulate, and let queries read k types each, -> (B, T, H, V).

    q (B, T - first, H, K), and the reads are those from `first` on; before it nothing is distant.
    Padding stands behind all real tokens, where it changes nothing, and reads nothing.
    """
    rows = torch.arange(first, span.length, device=q.device)
    read = smat_attention_at(
        q, k, v, mask, rows, feature_map="identity", log_decay=log_decay,
        write_weight=write_weight, profile=profile, query_type=reads.query_type,
        read_weight=reads.read_weight, normalize=False, cu_seqlens=span.cu_seqlens,
        branch="long_range",
    )  # fmt: skip
    return span.quiet(F.pad(read, (0, 0, 0, 0, first, 0)))
