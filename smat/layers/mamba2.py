"""Mamba-2: a scalar-gated recurrence, computed by the chunked linear attention of this library."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor, nn
from typing_extensions import Self

from smat.distributed import HeadRanks
from smat.layers.call import CallInfo, MixerCache, attend
from smat.layers.memory.memory import ProfileMemory
from smat.layers.memory.settings import KeyInit, MemorySettings
from smat.layers.mixer import Mixer
from smat.layers.primitives import (
    GateThenNorm,
    init_decay_rate_,
    init_step_bias_,
    keep_from_decay_,
    step_and_log_decay,
)
from smat.layers.short_convolution import ShortConvolution
from smat.masks import BoundarySchedule, SMatMask, none
from smat.ops.smat.arguments import check_choice


class Mamba2(Mixer):
    """The Mamba-2 layer.

    >>> layer = Mamba2(hidden_size=32, head_dim=16, state_dim=8)
    >>> x = torch.randn(2, 50, 32)
    >>> out, _, cache = layer(x, use_cache=True)
    >>> out_t, cache = layer.step(torch.randn(2, 32), cache)
    >>> out_t.shape, cache.num_tokens
    (torch.Size([2, 32]), tensor([51, 51]))

    S_t = exp(-A step_t) S_{t-1} + step_t B_t x_t',   y_t = S_t' C_t + D x_t,
    out = W (RMSNorm(y SiLU(z))),  with  [z, x, B, C, step] = W x  and a convolution over x, B, C.

    This is linear attention with q = C, k = B, v = step x and no normaliser: one algorithm serves
    both. With a `memory` the recurrence is the causal branch of its mask, reset at the boundary
    (the convolution too), and the memory the long-range branch: one SMat-Attention, one state.
    `with_memory` derives heads, mask and boundary; `settings` are `MemorySettings`, or "paper":

    >>> layer = Mamba2.with_memory(32, vc_dim=3, horizon=256, head_dim=16, state_dim=8)
    >>> layer.memory.mask.describe()
    'SMatMask: T = 256, d = 3, q = 7, n = 128, c = 64, boundary = kept(128)'
    >>> layer(torch.randn(2, 50, 32))[0].shape
    torch.Size([2, 50, 32])

    Conventions of mamba_ssm: no scale, gate before norm, one norm a group, bias in the convolution
    only, A from U(1, 16), steps from [0.001, 0.1], D = 1; linear layers as torch draws them. Heads
    of a group are neighbours. `norm_groups=1` norms all groups together, as transformers does.
    `key_init="positive"` is ours: a bias of 1 in the convolution of B and C, so that all products
    of the two begin positive; None takes that of a memory's settings.
    """

    packs_natively = True
    reads_at_queries = True

    def __init__(
        self,
        hidden_size: int,
        *,
        state_dim: int = 128,
        head_dim: int = 64,
        expand: int = 2,
        num_groups: int = 1,
        norm_groups: int | None = None,
        conv_size: int = 4,
        conv_bias: bool = True,
        bias: bool = False,
        norm_eps: float = 1e-5,
        key_init: KeyInit | None = None,
        memory: ProfileMemory | None = None,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layer_idx)
        inner = expand * hidden_size
        if inner % head_dim:
            raise ValueError(f"{expand} x {hidden_size} channels make no heads of {head_dim}")
        num_heads = inner // head_dim
        if num_heads % num_groups:
            raise ValueError(f"{num_heads} heads do not fall into {num_groups} groups")
        self.hidden_size, self.state_dim = hidden_size, state_dim
        self.head_dim, self.num_heads, self.num_groups = head_dim, num_heads, num_groups
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_proj = nn.Linear(hidden_size, sum(self.widths), bias=bias, **made)
        self.conv = ShortConvolution(self.widths[1], conv_size, conv_bias, **made)
        self.dt_bias = nn.Parameter(torch.empty(num_heads, **made))
        self.A_log = nn.Parameter(torch.empty(num_heads, **made))
        self.D = nn.Parameter(torch.empty(num_heads, **made))
        self.norm = GateThenNorm(inner, norm_eps, norm_groups or num_groups, **made)
        self.out_proj = nn.Linear(inner, hidden_size, bias=bias, **made)
        if memory is not None:
            memory.check_layer(hidden_size, num_heads)
        start = "random" if memory is None else memory.settings.key_init
        self.key_init = start if key_init is None else key_init
        check_choice("key_init", self.key_init, get_args(KeyInit))
        if self.key_init == "positive" and not conv_bias:
            raise ValueError("key_init = 'positive' is a bias, but conv_bias is False")
        self.memory = memory
        self.extra_inputs = () if memory is None else ("mask",)
        self.plain_mask = SMatMask(1, vc_dim=1, boundary=none())
        self.reset_parameters()

    @classmethod
    def with_memory(
        cls,
        hidden_size: int,
        *,
        horizon: int,
        vc_dim: int = 3,
        boundary: BoundarySchedule | None = None,
        num_reads: int = 4,
        selector: str = "top_types",
        settings: MemorySettings | str = "default",
        head_dim: int = 64,
        expand: int = 2,
        **layer: Any,
    ) -> Self:
        """Make the layer with a memory of d = `vc_dim`, the first half of `horizon` distant.

        `boundary` puts the boundary elsewhere, or lets it move: a schedule without horizon;
        `selector` is that of `LearnedRouting`.
        """
        memory = ProfileMemory.for_horizon(
            hidden_size, expand * hidden_size // head_dim, vc_dim=vc_dim, horizon=horizon,
            boundary=boundary, num_reads=num_reads, selector=selector,
            settings=settings,
        )  # fmt: skip
        memory.to(device=layer.get("device"), dtype=layer.get("dtype"))
        return cls(hidden_size, head_dim=head_dim, expand=expand, memory=memory, **layer)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        init_step_bias_(self.dt_bias)
        init_decay_rate_(self.A_log, 1.0, 16.0)
        keep_from_decay_(nn.init.ones_(self.D))
        if self.key_init == "positive":
            assert self.conv.bias is not None
            nn.init.ones_(self.conv.bias[self.inner_size :])

    @property
    def inner_size(self) -> int:
        """The width of all heads."""
        return self.num_heads * self.head_dim

    @property
    def widths(self) -> list[int]:
        """Of the gate, of what is convolved, and of the steps."""
        inner = self.inner_size
        return [inner, inner + 2 * self.num_groups * self.state_dim, self.num_heads]

    def cut_heads(self, ranks: HeadRanks) -> None:
        heads, groups, inner = self.num_heads, self.num_groups, self.inner_size
        own, own_groups = ranks.own(heads), ranks.own_groups(groups)
        convolved = [(inner, heads), *[(groups * self.state_dim, groups)] * 2]
        ranks.cut(self.in_proj, (inner, heads), *convolved, (heads, heads))
        ranks.cut(self.conv, *convolved)
        ranks.cut(self, (heads, heads))
        self.norm.cut_heads(ranks, heads)
        ranks.add_up(self.out_proj, heads)
        if self.memory is not None:
            self.memory.cut_heads(ranks)
        self.num_heads, self.num_groups = own, own_groups

    def mix(self, x: Tensor, call: CallInfo) -> tuple[Tensor, MixerCache | None]:
        gate, inputs, raw_step = self.in_proj(x).split(self.widths, -1)
        mask = None
        if self.memory is not None:
            mask = self.memory.mask_of(call)
            self.memory.check_mask(mask)
        shared = self.num_groups * self.state_dim
        convolved, conv = self.conv.run(inputs, call, mask=mask)
        skip, k, q = convolved.split([self.inner_size, shared, shared], -1)
        q, k = (each.unflatten(-1, (self.num_groups, -1)) for each in (q, k))
        skip = skip.unflatten(-1, (self.num_heads, self.head_dim))
        step, log_decay = step_and_log_decay(raw_step, self.dt_bias, self.A_log)
        v = (skip * step.unsqueeze(-1)).to(skip.dtype)
        if call.queries is not None:
            q, skip, gate = (each[:, call.queries] for each in (q, skip, gate))
        y, states = self.recur(x, q, k, v, step, log_decay, call)
        y = y + self.D.to(y.dtype).unsqueeze(-1) * skip
        out = self.out_proj(self.norm(y.flatten(-2), gate))
        return out, call.cache(conv=conv, mask=mask, **states)

    def recur(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, step: Tensor, log_decay: Tensor,
        call: CallInfo,
    ) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
        """Run q, k (B, T, groups, N), v (B, T, H, P), step and log_decay (B, T, H): y, states."""
        memory = self.memory
        if memory is None:
            y, state = attend(q, k, v, self.plain_mask, call, log_decay=log_decay)
            return y, {"state": state, "routing": None}
        mask = memory.mask_of(call)
        routing, bin_position, routing_state = memory.route(x, mask, call)
        routing, read_mask = memory.weigh_values(routing, step), memory.read_mask(mask)
        given: dict[str, Any] = {"decay_scope": memory.decay_scope, "log_decay": log_decay}
        if call.past is None:
            given["neighbours"] = memory.neighbours(routing, bin_position, mask)
        y, state = attend(q, k, v, read_mask, call, **given, **routing._asdict())
        return y, {"state": state, "routing": routing_state}
