"""SMat-Attention as a layer (Section 3): projections, gates and routing around the operation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.layers.hashed_routing import PositionalRouting, Routing
from smat.layers.lengths import mask_recipe
from smat.layers.mamba2 import decode
from smat.layers.mixer import Mixer
from smat.layers.primitives import (
    NormThenGate,
    RMSNorm,
    init_decay_rate_,
    init_step_bias_,
    step_and_log_decay,
)
from smat.layers.short_convolution import ShortConvolution
from smat.layers.span import MixerCache, Span
from smat.masks import BoundarySchedule, SMatMask
from smat.ops import smat_attention, smat_attention_at
from smat.ops.arguments import check_positions
from smat.ops.convolve import convolve, convolve_at, window
from smat.ops.feature_maps import Favor, FeatureMap


class SMatAttention(Mixer):
    """Linear attention under a mask of chosen VC dimension.

    >>> layer = SMatAttention(hidden_size=32, num_heads=4, vc_dim=2, horizon=128, chunk_size=16)
    >>> x = torch.randn(2, 100, 32)
    >>> out, _, cache = layer(x, use_cache=True)
    >>> out_t, cache = layer.step(torch.randn(2, 32), cache)
    >>> out_t.shape, cache["state"].positions
    (torch.Size([2, 32]), [101, 101])

    `vc_dim=1` is linear attention. Its state grows with `feature_dim`, the number r of features a
    head: that of a memory-matched linear attention is the key width times (B + 1).

    Args:
        hidden_size: The width of the layer's input and output.
        num_heads, num_kv_heads, head_dim: Query heads, key heads (as many unless given), and the
            width of a value.
        vc_dim, chunk_size, field_size, boundary: Those of `SMatMask`.
        horizon: The length that fixes the geometry and the boundary, so that one mask serves every
            length and decoding has no horizon: shorter inputs are its leading block, and past it
            the boundary stays. None takes the mask of each input's own length: nothing to decode
            from.
        feature_map: That of `smat_attention`.
        feature_dim: r, the width of queries and keys, or of their features for "favor".
        normalize: Divide by the sum of weights.
        qk_norm: RMSNorm of queries and keys.
        conv_size: Width of a short convolution of q, k and v; 0 for none.
        decay_gate: A scalar decay a head, a = exp(-A softplus(W x + dt_bias)), as Mamba-2 has.
        key_gate: h = sigmoid(W x), which scales what a token writes.
        output_gate, output_norm: RMSNorm(y) SiLU(W x) per head, either or both.
        routing: Who writes where and reads what: positions unless given, `HashedRouting`,
            `ContentRouting`, or any module with their two methods.
    """

    packs_natively = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        vc_dim: int = 3,
        horizon: int | None = None,
        chunk_size: int = 64,
        field_size: int | None = None,
        boundary: BoundarySchedule | None = None,
        feature_map: FeatureMap = "elu",
        feature_dim: int | None = None,
        normalize: bool = True,
        qk_norm: bool = False,
        conv_size: int = 0,
        decay_gate: bool = False,
        key_gate: bool = False,
        output_gate: bool = False,
        output_norm: bool = False,
        routing: Routing | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        head_dim = hidden_size // num_heads if head_dim is None else head_dim
        key_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % key_heads:
            raise ValueError(f"{num_heads} query heads are no multiple of {key_heads} key heads")
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, key_heads
        self.head_dim, self.normalize, self.feature_map = head_dim, normalize, feature_map
        key_dim = head_dim if feature_dim is None else feature_dim
        if feature_map == "favor":
            self.feature_map, key_dim = Favor(feature_dim), head_dim
        self.horizon = horizon
        self.recipe = mask_recipe(horizon, vc_dim, chunk_size, field_size, boundary)
        self.routing: Routing = PositionalRouting() if routing is None else routing
        self.widths = [num_heads * key_dim, key_heads * key_dim, key_heads * head_dim]
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(hidden_size, sum(self.widths), bias=False, **made)
        self.conv = ShortConvolution(sum(self.widths), conv_size, **made) if conv_size else None
        self.q_norm = RMSNorm(key_dim, **made) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(key_dim, **made) if qk_norm else nn.Identity()
        self._make_gates(decay_gate, key_gate, output_gate, output_norm, made)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False, **made)
        self.reset_parameters()

    def _make_gates(
        self, decay: bool, key: bool, output: bool, output_norm: bool, made: dict[str, Any]
    ) -> None:
        def linear(width: int, wanted: bool) -> nn.Linear | None:
            return nn.Linear(self.hidden_size, width, bias=False, **made) if wanted else None

        self.h_proj = linear(self.num_kv_heads, key)
        self.a_proj = linear(self.num_kv_heads, decay)
        if decay:
            self.dt_bias = nn.Parameter(torch.empty(self.num_kv_heads, **made))
            self.A_log = nn.Parameter(torch.empty(self.num_kv_heads, **made))
        self.g_proj = linear(self.num_heads * self.head_dim, output)
        norm = NormThenGate if output else RMSNorm
        self.norm = norm(self.head_dim, **made) if output_norm else None

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        super().reset_parameters()
        if self.a_proj is not None:
            init_step_bias_(self.dt_bias)
            init_decay_rate_(self.A_log)

    def mask_for(self, length: int) -> SMatMask:
        """Return the mask of the horizon, or without one that of an input's own length."""
        return self.recipe if self.horizon is not None else self.recipe.for_length(length)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: MixerCache | None = None,
        use_cache: bool = False,
        *,
        positions: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, MixerCache | None]:
        """Mix tokens as every mixer does; or only as seen from `positions` (R,): (B, R, hidden).

        Queries, reads and outputs are then made at these positions alone. Where there is padding,
        a cache, or a mask for each packed sequence, all are made and these returned.
        """
        given = (hidden_states, attention_mask, past_key_values, use_cache)
        if positions is None:
            return super().forward(*given, **kwargs)
        check_positions(positions, hidden_states.shape[1])
        apart = self.horizon is None and kwargs.get("cu_seqlens") is not None
        if attention_mask is None and past_key_values is None and not use_cache and not apart:
            return super().forward(*given, positions=positions, **kwargs)
        out, _, cache = super().forward(*given, **kwargs)
        return out[:, positions], None, cache

    def mix(self, x: Tensor, span: Span) -> tuple[Tensor, MixerCache | None]:
        if self.horizon is None and (span.use_cache or span.cu_seqlens is not None):
            return self._mix_apart(x, span)
        if span.rows is not None:
            windows = x[:, window(span.rows, self.conv_size)]
            projected = [F.linear(x, weight) for weight in self.row_weights()]
            return self.mix_rows(windows, projected, span, x), None
        q, k, v, inputs = self._project(x, span)
        gates = [None if each is None else each(x) for each in (self.a_proj, self.h_proj)]
        y, state, route = self._attend(x, q, k, v, gates, span)
        out = self.o_proj(self._finish(x, y).flatten(-2))
        if not span.use_cache:
            return out, None
        conv = None
        if self.conv is not None:
            past = span.part("conv")
            conv = self.conv.next_state(inputs, past, span.lengths, span.cu_seqlens)
        return out, span.cache(conv=conv, state=state, routing=route)

    @property
    def conv_size(self) -> int:
        """The number of tokens that a query is made of."""
        return 1 if self.conv is None else self.conv.width

    def row_weights(self) -> list[Tensor]:
        """List what all tokens are multiplied by when only rows are wanted: keys, values, gates."""
        gates = [each.weight for each in (self.a_proj, self.h_proj) if each is not None]
        return [*self.qkv_proj.weight.split(self.widths)[1:], *gates]

    def mix_rows(
        self, windows: Tensor, projected: Sequence[Tensor], span: Span, x: Tensor | None = None
    ) -> Tensor:
        """Mix as seen from ``span.rows`` alone, (B, R, hidden).

        `windows` (B, R, conv_size, hidden) are the inputs that the rows' queries are made of, and
        `projected` those of all tokens times `row_weights`. The inputs themselves, x, are for a
        routing that looks at them.
        """
        rows, first = span.rows, span.first_visible()
        assert rows is not None
        k, v, *made = projected
        q_weight = self.qkv_proj.weight[: self.widths[0]]
        q = F.linear(windows, q_weight)
        if self.conv is None:
            q = q.squeeze(2)
        else:
            q_taps, k_taps, v_taps = self.conv.weight.split(self.widths)
            q = convolve_at(q, rows, q_taps, activation=True, first=first)
            k = convolve(k, k_taps, None, activation=True, first=first)
            v = convolve(v, v_taps, None, activation=True, first=first)
        a = None if self.a_proj is None else made.pop(0)
        gates = [a, None if self.h_proj is None else made.pop(0)]
        y, _, _ = self._attend(x, q, k, v, gates, span)
        return self.o_proj(self._finish(windows[:, :, -1], y).flatten(-2))

    def _project(self, x: Tensor, span: Span) -> tuple[Tensor, ...]:
        """Return queries, keys and values, and what went into their convolution."""
        inputs = self.qkv_proj(x)
        convolved = inputs
        if self.conv is not None:
            convolved = self.conv(inputs, span.part("conv"), span.first_visible())
        return *convolved.split(self.widths, -1), inputs

    def _attend(
        self,
        x: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Sequence[Tensor | None],
        span: Span,
    ) -> tuple[Tensor, Any, Any]:
        q = self.q_norm(q.unflatten(-1, (self.num_heads, -1)))
        k = self.k_norm(k.unflatten(-1, (self.num_kv_heads, -1)))
        v = v.unflatten(-1, (self.num_kv_heads, -1))
        mask = self.mask_for(span.length)
        # x is None only where the routing does not look at it.
        assignment, route = self.routing(cast(Tensor, x), mask, span)
        per_token, state = {**self._gates(*gates), **assignment._asdict()}, span.part("state")
        if state is not None:
            y, state = decode(state, q, k, v, span, **per_token)
            return y, state, route
        mask = self.routing.read_mask(mask)
        per_token.update(
            feature_map=self.feature_map, normalize=self.normalize, cu_seqlens=span.cu_seqlens
        )
        if span.rows is not None:
            return smat_attention_at(q, k, v, mask, span.rows, **per_token), None, route
        y, state = smat_attention(
            q, k, v, mask, attention_mask=span.real, output_final_state=span.use_cache, **per_token
        )
        return y, state, route

    def _gates(self, a: Tensor | None, h: Tensor | None) -> dict[str, Any]:
        log_decay = None
        if a is not None:
            _, log_decay = step_and_log_decay(a, self.dt_bias, self.A_log)
        return {"log_decay": log_decay, "key_gate": None if h is None else h.sigmoid()}

    def _finish(self, x: Tensor, y: Tensor) -> Tensor:
        if self.g_proj is None:
            return y if self.norm is None else self.norm(y)
        gate = self.g_proj(x).view_as(y)
        return y * F.silu(gate) if self.norm is None else self.norm(y, gate)

    def _mix_apart(self, x: Tensor, span: Span) -> tuple[Tensor, MixerCache | None]:
        """Give every packed sequence the mask of its own length."""
        if span.use_cache:
            raise ValueError(
                "without a horizon the mask follows the length of each input, and nothing can be "
                f"decoded after it; make the layer with a horizon, such as horizon={span.length}"
            )
        assert span.cu_seqlens is not None
        edges = span.cu_seqlens.tolist()
        outputs = [x.new_zeros(1, 0, self.hidden_size)]
        for start, stop in itertools.pairwise(edges):
            if stop > start:
                extras = {name: _cut(each, start, stop) for name, each in span.extras.items()}
                outputs.append(self.forward(x[:, start:stop], **extras)[0])
        return torch.cat(outputs[1:], 1), None


def _cut(x: Any, start: int, stop: int) -> Any:
    return x[:, start:stop] if isinstance(x, Tensor) and x.ndim > 1 else x
