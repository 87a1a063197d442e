"""Mamba-2: a scalar-gated recurrence, computed by the chunked linear attention of this library."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from smat.layers.mixer import AdditiveMemory, DistantMemory, Mixer, local_mask
from smat.layers.primitives import (
    GateThenNorm,
    init_decay_rate_,
    init_step_bias_,
    keep_from_decay_,
    step_and_log_decay,
)
from smat.layers.short_convolution import ShortConvolution
from smat.layers.span import MixerCache, Span
from smat.masks import SMatMask, none
from smat.ops import SMatState, smat_attention


class Projected(NamedTuple):
    """What the recurrence of Mamba-2 takes: its names in linear attention, and the skip input."""

    q: Tensor  # C, (B, T, G, N), one for each group of heads
    k: Tensor  # B, (B, T, G, N)
    v: Tensor  # step x, (B, T, H, P)
    log_decay: Tensor  # (B, T, H)
    skip: Tensor  # x, (B, T, H, P)

    def per_head(self) -> tuple[Tensor, Tensor]:
        """Give every head the C and the B of its group, (B, T, H, N)."""
        heads_of_group = self.v.shape[2] // self.q.shape[2]
        q, k = (x.repeat_interleave(heads_of_group, 2) for x in (self.q, self.k))
        return q, k


class Mamba2(Mixer):
    """The Mamba-2 layer.

    >>> layer = Mamba2(hidden_size=32, head_dim=16, state_dim=8)
    >>> x = torch.randn(2, 50, 32)
    >>> out, _, cache = layer(x, use_cache=True)
    >>> out.shape
    torch.Size([2, 50, 32])
    >>> out_t, cache = layer.step(torch.randn(2, 32), cache)
    >>> out_t.shape, cache.num_tokens
    (torch.Size([2, 32]), tensor([51, 51]))

    S_t = exp(-A step_t) S_{t-1} + step_t B_t x_t',   y_t = S_t' C_t + D x_t,
    out = W (RMSNorm(y SiLU(z))),  with  [z, x, B, C, step] = W x  and a convolution over x, B, C.

    This is linear attention with q = C, k = B, v = step x and no normaliser: one algorithm serves
    both. With a `memory` the state and the convolution are reset at the boundary of its mask, and
    what it reads of the distant tokens is added before the norm.

    Conventions of mamba_ssm: no scale, gate before norm, one norm a group, bias in the convolution
    only, A from U(1, 16), steps from [0.001, 0.1], D = 1; linear layers as torch draws them.
    """

    packs_natively = True

    def __init__(
        self,
        hidden_size: int,
        *,
        state_dim: int = 128,
        head_dim: int = 64,
        expand: int = 2,
        num_groups: int = 1,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        memory: DistantMemory | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inner = expand * hidden_size
        if inner % head_dim:
            raise ValueError(f"{expand} x {hidden_size} channels make no heads of {head_dim}")
        num_heads = inner // head_dim
        if num_heads % num_groups:
            raise ValueError(f"{num_heads} heads do not fall into {num_groups} groups")
        self.hidden_size, self.inner_size, self.state_dim = hidden_size, inner, state_dim
        self.head_dim, self.num_heads, self.num_groups = head_dim, num_heads, num_groups
        self.widths = [inner, inner + 2 * num_groups * state_dim, num_heads]
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(hidden_size, sum(self.widths), bias=bias, **made)
        self.conv = ShortConvolution(self.widths[1], conv_size, conv_bias, **made)
        self.dt_bias = nn.Parameter(torch.empty(num_heads, **made))
        self.A_log = nn.Parameter(torch.empty(num_heads, **made))
        self.D = nn.Parameter(torch.empty(num_heads, **made))
        self.norm = GateThenNorm(inner, norm_eps, num_groups, **made)
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias, **made)
        self.memory = memory
        self.plain_mask = SMatMask(1, vc_dim=1, chunk_size=chunk_size, boundary=none())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        super().reset_parameters()
        init_step_bias_(self.dt_bias)
        init_decay_rate_(self.A_log, 1.0, 16.0)
        keep_from_decay_(nn.init.ones_(self.D))

    def mix(self, x: Tensor, span: Span) -> tuple[Tensor, MixerCache | None]:
        gate, inputs, raw_step = self.in_proj(x).split(self.widths, -1)
        mask = None if self.memory is None else local_mask(self.memory, span)
        first = span.first_visible(mask)
        past = span.part("conv")
        tokens = self._project(self.conv(inputs, past, first), raw_step)
        y, state, distant = self._remember(x, tokens, mask, span)
        y = y + self.D.to(y.dtype).unsqueeze(-1) * tokens.skip
        out = self.out_proj(self.norm(y.flatten(-2), gate))
        if not span.use_cache:
            return out, None
        conv = self.conv.next_state(inputs, past, span.lengths, span.cu_seqlens)
        return out, span.cache(conv=conv, state=state, memory=distant, mask=mask)

    def _remember(
        self, x: Tensor, tokens: Projected, mask: SMatMask | None, span: Span
    ) -> tuple[Tensor, Any, Any]:
        """Add what the recurrence and the memory beside it say, and return their states."""
        q, k, v, log_decay, _ = tokens
        begins = span.past is None and not span.use_cache
        if begins and isinstance(self.memory, AdditiveMemory):
            y, _ = smat_attention(
                q, k, v, feature_map="identity", log_decay=log_decay, normalize=False,
                attention_mask=span.real, cu_seqlens=span.cu_seqlens,
                **self.memory.assign(x, span),
            )  # fmt: skip
            return y, None, None
        y, state = self.recur(x, tokens, mask, span)
        if self.memory is None:
            return y, state, None
        read, distant = self.memory(x, *tokens.per_head(), v, log_decay, None, span)
        return y + read, state, distant

    def _project(self, convolved: Tensor, raw_step: Tensor) -> Projected:
        shared = self.num_groups * self.state_dim
        skip, key, query = convolved.split([self.inner_size, shared, shared], -1)
        step, log_decay = step_and_log_decay(raw_step, self.dt_bias, self.A_log)
        skip = skip.unflatten(-1, (self.num_heads, self.head_dim))
        value = (skip * step.unsqueeze(-1)).to(skip.dtype)
        query, key = (x.unflatten(-1, (self.num_groups, -1)) for x in (query, key))
        return Projected(query, key, value, log_decay, skip)

    def recur(
        self, x: Tensor, tokens: Projected, mask: SMatMask | None, span: Span
    ) -> tuple[Tensor, Any]:
        """Run the recurrence over the tokens of a span, and return its state if asked for.

        With a mask it is reset at the boundary.
        """
        q, k, v, log_decay, _ = tokens
        # Distant keys weigh nothing in the state of a recurrence that is reset at the boundary.
        weight = None if mask is None else torch.zeros_like(log_decay)
        state: SMatState | None = span.part("state")
        if state is None:
            return smat_attention(
                q, k, v, mask or self.plain_mask, feature_map="identity", log_decay=log_decay,
                write_weight=weight, normalize=False, attention_mask=span.real,
                cu_seqlens=span.cu_seqlens, output_final_state=span.use_cache, branch="causal",
            )  # fmt: skip
        return decode(state, q, k, v, span, log_decay=log_decay, write_weight=weight)


def decode(
    state: SMatState, q: Tensor, k: Tensor, v: Tensor, span: Span, **per_token: Tensor | None
) -> tuple[Tensor, SMatState]:
    """Attend from new tokens (B, T, H, .) after those of a state, which has no gradient."""
    if span.single:
        first = {name: None if x is None else x[:, 0] for name, x in per_token.items()}
        out, state = state.step(q[:, 0], k[:, 0], v[:, 0], inplace=span.inplace, **first)
        return out.unsqueeze(1), state
    return state.extend(q, k, v, attention_mask=span.real, inplace=span.inplace, **per_token)
