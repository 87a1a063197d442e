"""Gated DeltaNet, and DeltaNet as the same layer without decay."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from smat.distributed import HeadRanks
from smat.layers.call import CallInfo, MixerCache, take_step
from smat.layers.memory.memory import TransportedMemory
from smat.layers.memory.over_ranks import read_over_ranks
from smat.layers.memory.settings import MemorySettings
from smat.layers.memory.transport import DeltaTokens, boundary_of, read_transported
from smat.layers.mixer import Mixer
from smat.layers.primitives import (
    NormThenGate,
    RMSNorm,
    expanded,
    init_decay_rate_,
    init_step_bias_,
    l2_norm,
    step_and_log_decay,
)
from smat.layers.short_convolution import ShortConvolution
from smat.ops.delta_rule import delta_rule, delta_rule_step
from smat.ops.delta_rule.over_ranks import delta_rule_over_ranks


class GatedDeltaNet(Mixer):
    """The Gated DeltaNet layer.

    >>> layer = GatedDeltaNet(hidden_size=32, num_heads=2, head_dim=8)
    >>> x = torch.randn(2, 50, 32)
    >>> out, _, cache = layer(x, use_cache=True)
    >>> out_t, cache = layer.step(torch.randn(2, 32), cache)
    >>> out_t.shape, cache["state"].shape
    (torch.Size([2, 32]), torch.Size([2, 2, 8, 16]))

    S_t = a_t (I - beta_t k_t k_t') S_{t-1} + beta_t k_t v_t',   y_t = K^(-1/2) S_t' q_t,
    out = W (RMSNorm(y) SiLU(gate)),  with q, k, v convolved, q and k of unit length,
    beta = sigmoid(W x)  and  a = exp(-A softplus(W x + dt_bias)).

    With a `memory` the state and the convolution are reset at the boundary of its mask, and what
    it reads of the distant tokens is added before the norm. `with_memory` makes one that fits:

    >>> layer = GatedDeltaNet.with_memory(32, vc_dim=3, horizon=256, num_heads=2, head_dim=8)
    >>> layer.memory.mask.describe()
    'SMatMask: T = 256, d = 3, q = 7, n = 128, c = 64, boundary = kept(128)'

    Conventions of flash-linear-attention: norm per head before the gate, no bias, A from U(0, 16);
    linear layers as torch draws them.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        num_heads: int = 4,
        head_dim: int = 64,
        expand_v: float = 2.0,
        conv_size: int = 4,
        decay: bool = True,
        output_gate: bool = True,
        allow_neg_eigval: bool = False,
        norm_eps: float = 1e-5,
        chunk_size: int = 64,
        memory: TransportedMemory | None = None,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layer_idx)
        value_dim = expanded(head_dim, expand_v)
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.head_dim, self.value_dim, self.chunk_size = head_dim, value_dim, chunk_size
        self.allow_neg_eigval = allow_neg_eigval
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(hidden_size, sum(self.widths), bias=False, **made)
        self.conv = ShortConvolution(sum(self.widths), conv_size, **made)
        self.b_proj = nn.Linear(hidden_size, num_heads, bias=False, **made)
        self.a_proj = nn.Linear(hidden_size, num_heads, bias=False, **made) if decay else None
        if decay:
            self.dt_bias = nn.Parameter(torch.empty(num_heads, **made))
            self.A_log = nn.Parameter(torch.empty(num_heads, **made))
        inner, norm = num_heads * value_dim, NormThenGate if output_gate else RMSNorm
        self.norm = norm(value_dim, norm_eps, **made)
        self.g_proj = nn.Linear(hidden_size, inner, bias=False, **made) if output_gate else None
        self.o_proj = nn.Linear(inner, hidden_size, bias=False, **made)
        if memory is not None:
            memory.check_layer(hidden_size, num_heads)
        self.memory = memory
        self.extra_inputs = () if memory is None else ("mask",)
        self.reset_parameters()

    @classmethod
    def with_memory(
        cls,
        hidden_size: int,
        *,
        horizon: int,
        vc_dim: int = 3,
        num_reads: int = 4,
        selector: str = "top_types",
        settings: MemorySettings | str = "default",
        num_heads: int = 4,
        **layer: Any,
    ) -> Self:
        """Make the layer with a memory of d = `vc_dim`, the first half of `horizon` distant."""
        memory = TransportedMemory.for_horizon(
            hidden_size, num_heads, vc_dim=vc_dim, horizon=horizon, num_reads=num_reads,
            selector=selector, settings=settings,
        )  # fmt: skip
        memory.to(device=layer.get("device"), dtype=layer.get("dtype"))
        return cls(hidden_size, num_heads=num_heads, memory=memory, **layer)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.a_proj is not None:
            init_step_bias_(self.dt_bias)
            init_decay_rate_(self.A_log, 0.0, 16.0)

    @property
    def widths(self) -> list[int]:
        """Of queries, keys and values."""
        return [self.num_heads * each for each in (self.head_dim, self.head_dim, self.value_dim)]

    def cut_heads(self, ranks: HeadRanks) -> None:
        heads, widths = self.num_heads, self.widths
        own = ranks.own(heads)
        for module in (self.qkv_proj, self.conv):
            ranks.cut(module, *((width, heads) for width in widths))
        for each in (self.b_proj, self.a_proj, self):
            ranks.cut(each, (heads, heads))
        ranks.share(self.norm)
        ranks.cut(self.g_proj, (widths[2], heads))
        ranks.add_up(self.o_proj, heads)
        if self.memory is not None:
            self.memory.cut_heads(ranks)
        self.num_heads = own

    def mix(self, x: Tensor, call: CallInfo) -> tuple[Tensor, MixerCache | None]:
        mask = None if self.memory is None else self.memory.mask_of(call)
        convolved, conv = self.conv.run(self.qkv_proj(x), call, mask=mask)
        tokens = self._project(x, convolved, call)
        routing = distant = None
        if self.memory is None or mask is None:
            y, state = self.recur(x, tokens, call)
        else:
            y, state = self.recur(x, reset_at(boundary_of(mask), tokens, call), call)
            chosen, bin_position, routing = self.memory.route(x, mask, call)
            reads = read_transported if call.share is None else read_over_ranks
            read, distant = reads(
                self.memory.tokens_of(tokens), chosen, self.memory.read_mask(mask), call,
                self.memory.neighbours(chosen, bin_position, mask), erases=self.memory.erases,
            )  # fmt: skip
            y = y + read
        gate = [] if self.g_proj is None else [self.g_proj(x).view_as(y)]
        out = self.o_proj(self.norm(y, *gate).flatten(-2))
        return out, call.cache(conv=conv, state=state, routing=routing, memory=distant, mask=mask)

    def _project(self, x: Tensor, convolved: Tensor, call: CallInfo) -> DeltaTokens:
        q, k, v = (
            each.unflatten(-1, (self.num_heads, -1)) for each in convolved.split(self.widths, -1)
        )
        beta = self.b_proj(x).sigmoid() * (2 if self.allow_neg_eigval else 1)
        log_decay = None
        if self.a_proj is not None:
            _, log_decay = step_and_log_decay(self.a_proj(x), self.dt_bias, self.A_log)
            log_decay = call.close(log_decay)
        return DeltaTokens(l2_norm(q), l2_norm(k), v, call.close(beta), log_decay)

    def recur(self, x: Tensor, tokens: DeltaTokens, call: CallInfo) -> tuple[Tensor, Any]:
        if call.share is not None:
            ranks = call.share, call.rows
            return delta_rule_over_ranks(*tokens, *ranks, chunk_size=self.chunk_size)
        return run_delta_rule(tokens, call.before("state"), call.use_cache, self.chunk_size)


class DeltaNet(GatedDeltaNet):
    """Gated DeltaNet without decay and output gate."""

    def __init__(self, hidden_size: int, *, expand_v: float = 1.0, **options: Any) -> None:
        options = {"decay": False, "output_gate": False, **options}
        super().__init__(hidden_size, expand_v=expand_v, **options)


def reset_at(boundary: int, tokens: DeltaTokens, call: CallInfo) -> DeltaTokens:
    """Forget everything at the first recent token: a log-decay of minus infinity there."""
    if boundary == 0:
        return tokens
    log_decay = torch.zeros_like(tokens.beta) if tokens.log_decay is None else tokens.log_decay
    edge = (call.positions() == boundary).expand(log_decay.shape[:2])
    edge = edge if call.real is None else edge & call.real
    return tokens._replace(log_decay=log_decay.masked_fill(edge.unsqueeze(-1), -torch.inf))


def run_delta_rule(
    tokens: DeltaTokens, state: Tensor | None, keeps_state: bool, chunk_size: int
) -> tuple[Tensor, Tensor | None]:
    """Run the delta rule after a state, one token by a step and several in chunks."""
    if state is not None and tokens.q.shape[1] == 1:
        return take_step(partial(delta_rule_step, state=state), 0, **tokens._asdict())
    return delta_rule(
        *tokens, initial_state=state, output_final_state=keeps_state, chunk_size=chunk_size
    )
