"""Profile memories beside a recurrent backbone, additive form (appendix "Memory updates", Mamba-2).

The memory of a profile decays with the backbone and receives what its tokens write,

    F_x <- a_j F_x + 1{x_j = x} omega_j g_j k_j v_j',      U_h = sum_x C_hx F_x.

Here x is the profile, omega the straight-through weight, g the write gate (the paper calls both
omega), a the backbone's decay. The reads are those of routed_memory.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.layers.routed_memory import (
    RoutedMemory,
    SigmoidGate,
    first_reader,
    read_types,
    whole_span,
)
from smat.layers.routing import Route
from smat.layers.span import Span
from smat.masks import SMatMask
from smat.ops import SMatState

# A state reads recent keys too, which are the local branch's affair. They go in scaled down until
# they vanish beside the distant ones, whose weight makes up for it: powers of two cost no digit.
FAINT = 2.0**-64


@dataclass(frozen=True)
class MemoryState:
    """What decoding carries: the mask, the last inputs of the hash, and the tables."""

    mask: SMatMask
    hash_input: Tensor
    tables: SMatState

    def select(self, rows: Tensor | Sequence[int]) -> MemoryState:
        """Take batch rows, in any order and any number of times."""
        index = torch.as_tensor(rows, device=self.hash_input.device)
        return MemoryState(self.mask, self.hash_input[index], self.tables.select(index))


class ProfileMemory(RoutedMemory):
    """Additive profile memories with learned routing, for backbones with a scalar decay.

    >>> mask = SMatMask(seq_len=64, vc_dim=3, chunk_size=16, field_size=3)
    >>> memory = ProfileMemory(hidden_size=8, num_heads=2, mask=mask)
    >>> hidden, log_decay = torch.randn(1, 64, 8), -0.1 * torch.rand(1, 64, 2)
    >>> q, k, v = torch.randn(3, 1, 64, 2, 4)
    >>> out, _ = memory(hidden, q, k, v, log_decay)
    >>> out.shape, bool((out[:, :32] == 0).all())  # nothing is distant for the first half
    (torch.Size([1, 64, 2, 4]), True)

    O(T) work beside the scoring of types, forward and backward, with any boundary schedule: the
    stepped window too, whose decoding has no horizon.

    Paper: k, v, a = `k`, `v`, exp `log_decay`, those of the backbone; q~ = `q`.
    """

    def __init__(self, hidden_size: int, num_heads: int, mask: SMatMask, **routing: Any) -> None:
        super().__init__(hidden_size, num_heads, mask, **routing)
        self.write_gate = SigmoidGate(hidden_size, num_heads)

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        super().reset_parameters()
        self.write_gate.reset_parameters()

    def forward(
        self,
        hidden_states: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        span: Span | None = None,
    ) -> tuple[Tensor, MemoryState | None]:
        """Return what the tokens of a span read, (B, T, H, V), and the state if it is wanted.

        `hidden_states` (B, T, hidden_size) is the layer's input, from which writes and reads are
        routed; q, k (B, T, H, K), v (B, T, H, V), log_decay (B, T, H). Without a span it is all
        one batch of new sequences. After the tokens of an earlier state there is no gradient.
        """
        if beta is not None:
            raise ValueError("additive memories have no beta; TransportedMemory has")
        span = whole_span(hidden_states) if span is None else span
        past: MemoryState | None = span.part("memory")
        if past is not None:
            return self._decode(hidden_states, q, k, v, log_decay, span, past)
        mask = self.mask_of(span)
        first = first_reader(mask, span)
        route = self.route(hidden_states, mask, span, None, first)
        write_weight = self._write_weight(route, hidden_states)
        out = read_types(
            q[:, first:], k, v, self.routing.read_mask(mask), route.reads, first, span,
            profile=route.address.profile, write_weight=write_weight, log_decay=log_decay,
        )  # fmt: skip
        if not span.use_cache:
            return out, None
        tables = SMatState.after(
            k, v, self.routing.read_mask(mask), feature_map="identity", normalize=False,
            log_decay=log_decay, profile=route.address.profile, lengths=span.lengths,
            cu_seqlens=span.cu_seqlens, **_faint(write_weight),
        )  # fmt: skip
        return out, MemoryState(mask, self.next_hash_state(hidden_states, span, None), tables)

    def assign(self, hidden_states: Tensor, span: Span) -> dict[str, Any]:
        """Return mask, profiles, types and their weights, as arguments of `smat_attention`."""
        mask = self.mask_of(span)
        first = first_reader(mask, span)
        route = self.route(hidden_states, mask, span, None, first)
        query_type, read_weight = (F.pad(x, (0, 0, 0, 0, first, 0)) for x in route.reads)
        return {
            "mask": self.routing.read_mask(mask), "profile": route.address.profile,
            "write_weight": self._write_weight(route, hidden_states), "query_type": query_type,
            "read_weight": read_weight,
        }  # fmt: skip

    def _write_weight(self, route: Route, hidden: Tensor) -> Tensor:
        return route.address.ste_weight * self.write_gate(hidden)

    def empty_state(
        self, hidden_states: Tensor, k: Tensor, v: Tensor, mask: SMatMask | None = None
    ) -> MemoryState:
        """Return the state before the first token of a batch like the given arrays (B, ...)."""
        mask = mask or self.mask
        tables = SMatState.empty(
            self.routing.read_mask(mask), len(k), self.routing.num_heads, k.shape[-1], v.shape[-1],
            feature_map="identity", normalize=False, weighted=True,
            dtype=torch.promote_types(v.dtype, torch.float32), device=k.device,
        )  # fmt: skip
        return MemoryState(mask, self.routing.hash.empty_state(hidden_states), tables)

    def step(
        self,
        hidden_state: Tensor,
        q_t: Tensor,
        k_t: Tensor,
        v_t: Tensor,
        log_decay: Tensor | None,
        state: MemoryState,
        *,
        inplace: bool = False,
    ) -> tuple[Tensor, MemoryState]:
        """Take one token, (B, hidden_size) and (B, H, .), and return what it reads, (B, H, V)."""
        hidden, q, k, v = (x.unsqueeze(1) for x in (hidden_state, q_t, k_t, v_t))
        decay = None if log_decay is None else log_decay.unsqueeze(1)
        span = Span(len(k), 1, k.device, use_cache=True, inplace=inplace)
        out, after = self._decode(hidden, q, k, v, decay, span, state)
        return out[:, 0], after

    @torch.no_grad()
    def _decode(
        self,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        span: Span,
        past: MemoryState,
    ) -> tuple[Tensor, MemoryState]:
        route = self.route(hidden, past.mask, span, past.hash_input)
        sees = _sees_distant(past.tables, span)
        per_token = {
            "log_decay": log_decay, "profile": route.address.profile,
            "query_type": route.reads.query_type, "read_weight": route.reads.read_weight,
            **_faint(self._write_weight(route, hidden)),
        }  # fmt: skip
        if span.length == 1 and span.real is None:
            token = {name: None if x is None else x[:, 0] for name, x in per_token.items()}
            out, tables = past.tables.step(q[:, 0], k[:, 0], v[:, 0], inplace=span.inplace, **token)
            out = out.unsqueeze(1)
        else:
            out, tables = past.tables.extend(
                q, k, v, attention_mask=span.real, inplace=span.inplace, **per_token
            )
        hash_input = self.next_hash_state(hidden, span, past.hash_input)
        return out.masked_fill(~sees[..., None, None], 0), MemoryState(
            past.mask, hash_input, tables
        )


def _faint(write_weight: Tensor) -> dict[str, Any]:
    """Let tokens write to profiles with their weight, and next to nothing elsewhere."""
    wide = write_weight.detach().to(torch.promote_types(write_weight.dtype, torch.float32))
    return {"key_gate": torch.full_like(wide, FAINT), "write_weight": wide / FAINT}


def _sees_distant(tables: SMatState, span: Span) -> Tensor:
    """Mark the new tokens for which something is distant, (B, T)."""
    pieces = tables.mask.schedule.pieces()
    first = next((start for start, boundary in pieces if boundary > 0), sys.maxsize)
    position = torch.tensor(tables.positions, device=span.device)[:, None]
    return position + torch.arange(span.length, device=span.device) >= first
