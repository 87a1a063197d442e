"""Softmax attention: the quadratic baseline, with rotary or learned positions and a KV cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.distributed import HeadRanks
from smat.distributed.exchange import gather
from smat.layers.call import CallInfo, MixerCache
from smat.layers.mixer import Mixer
from smat.layers.primitives import RMSNorm, head_sizes, rotate
from smat.layers.short_convolution import ShortConvolution

POSITIONS = ("rotary", "learned", "none")


class SoftmaxAttention(Mixer):
    """Causal softmax attention through torch's scaled dot product.

    >>> layer = SoftmaxAttention(hidden_size=32, num_heads=4, num_kv_heads=2)
    >>> x = torch.randn(2, 10, 32)
    >>> out, _, cache = layer(x, use_cache=True)
    >>> out_t, cache = layer.step(torch.randn(2, 32), cache)
    >>> out_t.shape, cache["keys"].shape
    (torch.Size([2, 32]), torch.Size([2, 11, 2, 8]))

    Positions are turned into the angles of queries and keys ("rotary"), looked up in a table of
    `max_length` rows that is added to the layer's input ("learned"), or left out ("none").
    `conv_size` is the width of a short convolution of q, k and v, as the recurrent layers have.
    Ranks that hold a sequence together gather all keys and values: memory grows with the whole.
    """

    packs_over_ranks = True

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        positions: str = "rotary",
        max_length: int | None = None,
        rotary_base: float = 10000.0,
        qk_norm: bool = False,
        conv_size: int = 0,
        bias: bool = False,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layer_idx)
        if positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {positions!r}")
        if (positions == "learned") != (max_length is not None):
            raise ValueError(f"positions {positions!r} do not go with max_length = {max_length}")
        key_heads, head_dim = head_sizes(hidden_size, num_heads, num_kv_heads, head_dim)
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, key_heads
        self.head_dim, self.positions, self.rotary_base = head_dim, positions, rotary_base
        self.max_length = max_length
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(hidden_size, sum(self.widths), bias=bias, **made)
        self.conv = ShortConvolution(sum(self.widths), conv_size, **made) if conv_size else None
        self.q_norm = RMSNorm(head_dim, **made) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(head_dim, **made) if qk_norm else nn.Identity()
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=bias, **made)
        if max_length is not None:
            self.position_table = nn.Parameter(torch.empty(max_length, hidden_size, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew; learned positions from N(0, 0.02)."""
        super().reset_parameters()
        if self.max_length is not None:
            nn.init.normal_(self.position_table, std=0.02)

    @property
    def widths(self) -> list[int]:
        """Of queries, keys and values."""
        heads = self.num_heads, self.num_kv_heads, self.num_kv_heads
        return [each * self.head_dim for each in heads]

    def cut_heads(self, ranks: HeadRanks) -> None:
        heads, key_heads = self.num_heads, self.num_kv_heads
        own = ranks.own(heads), ranks.own_groups(key_heads, "key heads")
        segments = list(zip(self.widths, (heads, key_heads, key_heads), strict=True))
        ranks.cut(self.qkv_proj, *segments)
        ranks.cut(self.conv, *segments)
        ranks.share(self.q_norm, self.k_norm, self)
        ranks.add_up(self.o_proj, heads)
        self.num_heads, self.num_kv_heads = own

    def mix(self, x: Tensor, call: CallInfo) -> tuple[Tensor, MixerCache | None]:
        position = call.positions()
        if self.max_length is not None and int(call.num_tokens.max()) > self.max_length:
            raise ValueError(
                f"{int(call.num_tokens.max())} tokens, but positions for {self.max_length}"
            )
        if self.max_length is not None:
            # Behind the real tokens of a padded row there may be positions past the table.
            x = x + self.position_table[position.clamp(max=self.max_length - 1)].to(x.dtype)
        projected, conv = self.qkv_proj(x), None
        if self.conv is not None:
            projected, conv = self.conv.run(projected, call)
        parts = projected.split(self.widths, -1)
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in parts)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.positions == "rotary":
            q, k = (rotate(each, position, self.rotary_base) for each in (q, k))
        seen = None  # causal: padding stands behind every real query
        if call.share is not None:
            k, v = (gather(each, call.share)[:, : call.share.stop] for each in (k, v))
            key = torch.arange(call.share.stop, device=k.device)
            own = key[call.share.start :]
            seen = (key >= (own - position).unsqueeze(-1)) & (key <= own.unsqueeze(-1))
        elif call.past is not None:
            k, v = (_append(call, name, new) for name, new in (("keys", k), ("values", v)))
            seen = torch.arange(k.shape[1], device=k.device) <= position.unsqueeze(-1)
        out = self.o_proj(self._attend(q, k, v, seen))
        return out, call.cache(keys=k, values=v, conv=conv)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """Attend (B, T, H, K) to (B, S, Hkv, K), where `seen` (B, T, S) says so; None is causal."""
        shared = self.num_heads // self.num_kv_heads
        if shared > 1:
            k, v = (each.repeat_interleave(shared, 2) for each in (k, v))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=seen is None,
            attn_mask=None if seen is None else seen.unsqueeze(1),
        )  # fmt: skip
        return out.transpose(1, 2).flatten(-2)


def _append(call: CallInfo, name: str, new: Tensor) -> Tensor:
    """Put the new keys or values of every row behind those it already has."""
    assert call.past is not None
    num_tokens = call.past.num_tokens
    old = call.past[name][:, : int(num_tokens.max())]
    held = F.pad(old, (0, 0, 0, 0, 0, call.length)).to(new.dtype)
    # Padding lands behind the real tokens of its row, where the next ones overwrite it.
    token = num_tokens[:, None] + torch.arange(call.length, device=new.device)
    return held.scatter(1, token[..., None, None].expand_as(new), new)
