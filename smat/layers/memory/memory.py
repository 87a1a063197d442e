"""A memory of distant tokens beside a recurrent backbone (Section 3, recurrent architectures).

The backbone forgets everything at the boundary, and a query t behind it adds

    lambda_t q_t' sum_h R_th U_h,      U_h = sum_x C_hx F_x,

to what its recurrence holds: U the type table, F_x the memory of profile x, R the read weights,
lambda the read gate. A memory routes; the backbone carries what is written with its own transitions
A_j (appendix "Memory updates"), omega the straight-through weight, g the write gate:

    Mamba-2           F_x <- a_j F_x + 1{x_j = x} omega_j g_j k_j v_j'       one SMat-Attention
    Gated DeltaNet    F_x <- A_j F_x + 1{x_j = x} omega_j beta_j k_j v_j'    transport.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from smat.layers.call import CallInfo
from smat.layers.primitives import describe_mask
from smat.layers.routing.learned import LearnedRouting
from smat.layers.routing.routers import ContentRouting
from smat.masks import SMatMask, kept
from smat.ops.smat.routing import Routing

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
        self.linear.reset_parameters()
        nn.init.constant_(self.linear.bias, GATE_LOGIT)
        if self.head_logit is not None:
            nn.init.zeros_(self.head_logit)

    def forward(self, hidden: Tensor) -> Tensor:
        logit = self.linear(hidden)
        return torch.sigmoid(logit if self.head_logit is None else logit + self.head_logit)


class Memory(ContentRouting):
    """Learned routing with gates, for a backbone that is reset at the boundary of `mask`.

    >>> mask = SMatMask(64, vc_dim=3, chunk_size=16, field_size=3, boundary=kept(32))
    >>> memory = Memory(hidden_size=8, num_heads=2, mask=mask, selector="factored")
    >>> call = CallInfo(1, 64, torch.device("cpu"))
    >>> routing, _ = memory(torch.randn(1, 64, 8), memory.mask_of(call), call)
    >>> routing.query_type.shape, bool((routing.read_weight[:, :32] == 0).all())
    (torch.Size([1, 64, 2, 4]), True)

    One mask fixes the geometry for all lengths; `other_masks` add those of other lengths, each
    field size with a hash and a scorer of its own. A call picks one of them by ``mask=`` among the
    arguments of its layer; a memory that was made `for_lengths` picks by the length of the call.
    `learned` are the options of `LearnedRouting`. `ProfileMemory` is for Mamba-2,
    `TransportedMemory` for Gated DeltaNet.
    """

    has_write_gate = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mask: SMatMask,
        *,
        other_masks: Sequence[SMatMask] = (),
        **learned: Any,
    ) -> None:
        geometries = [each.geometry for each in (mask, *other_masks)]
        super().__init__(LearnedRouting(hidden_size, num_heads, geometries, **learned))
        self.mask = mask
        self.mask_by_length: dict[int, SMatMask] = {}
        self.read_gate = SigmoidGate(hidden_size, num_heads, head_logit=True)
        self.write_gate = SigmoidGate(hidden_size, num_heads) if self.has_write_gate else None

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

        >>> memory = Memory.for_lengths(8, 2, vc_dim=2, lengths=[64, 128, 256])
        >>> list(memory.learned.selectors)  # one hash and one scorer for each field size
        ['7', '11', '13']

        Half of a length is distant. A call takes the geometry of the shortest length that holds it
        (padding included), the longest one past all; decoding keeps to the one it began with.
        """
        masks = {each: kept_mask(each, vc_dim, chunk_size) for each in sorted(lengths)}
        if not masks:
            raise ValueError("a memory needs at least one length, got none")
        *others, longest = masks.values()
        memory = cls(hidden_size, num_heads, longest, other_masks=others, **routing)
        memory.mask_by_length = masks
        return memory

    def extra_repr(self) -> str:
        return describe_mask(self.mask, self.mask.seq_len)

    def mask_of(self, call: CallInfo) -> SMatMask:
        """Return the mask of a call: the cache's, or the one that it names or its length picks."""
        if call.past is not None:
            return call.past["mask"]
        mask = call.extras.get("mask")
        if mask is not None or not self.mask_by_length:
            return self.mask if mask is None else mask
        if call.cu_seqlens is not None and len(self.mask_by_length) > 1:
            lengths = list(self.mask_by_length)
            raise ValueError(f"name one geometry of {lengths} by mask=, or pad packed sequences")
        masks = self.mask_by_length
        return masks[min((each for each in masks if each >= call.length), default=max(masks))]

    def forward(self, x: Tensor, mask: SMatMask, call: CallInfo) -> tuple[Routing, Tensor | None]:
        """Route the tokens of a call, with weights times gates, and return the hash's state."""
        routing, state = super().forward(x, mask, call)
        assert routing.read_weight is not None
        weights = {"read_weight": routing.read_weight * self.read_gate(x).unsqueeze(-1)}
        if self.write_gate is not None:
            weights["write_weight"] = routing.write_weight * self.write_gate(x)
        return routing._replace(**weights), state


class ProfileMemory(Memory):
    """The memory of a backbone with a scalar decay, Mamba-2: a gate weighs what is written."""

    has_write_gate = True


class TransportedMemory(Memory):
    """The memory of a delta-rule backbone, Gated DeltaNet, whose beta weighs what is written."""


def kept_mask(length: int, vc_dim: int, chunk_size: int | None = None) -> SMatMask:
    """Return the mask of a length whose first half is distant, with a boundary that stays there.

    >>> kept_mask(64, 2).describe()
    'SMatMask: T = 64, d = 2, q = 7, n = 32, c = 16, boundary = kept(32)'

    Chunks are a quarter of the length unless given, at least 16 tokens: short lengths too have a
    distant half.
    """
    chunk_size = max(16, length // 4) if chunk_size is None else chunk_size
    plain = SMatMask(length, vc_dim, chunk_size)
    return SMatMask(length, vc_dim, chunk_size, plain.geometry.field_size, kept(plain.num_distant))
