"""SMat-Attention as a layer (Section 3): projections, gates and routing around the operation."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.distributed import HeadRanks
from smat.layers.call import CallInfo, MixerCache, attend
from smat.layers.memory.memory import SigmoidGate
from smat.layers.memory.settings import MemorySettings
from smat.layers.mixer import Mixer
from smat.layers.primitives import (
    NormThenGate,
    RMSNorm,
    describe_mask,
    head_sizes,
    init_decay_rate_,
    init_step_bias_,
    step_and_log_decay,
)
from smat.layers.routing.routers import PositionalRouting, Router
from smat.layers.short_convolution import ShortConvolution
from smat.masks import BoundarySchedule, SMatMask
from smat.ops.feature_maps import Favor, FeatureMap
from smat.ops.smat.arguments import DECAY_SCOPES, check_choice
from smat.ops.smat.routing import Routing


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
        decay_scope: "all" (distant keys decay too, equation 9) or "recurrent" (they do not, as the
            paper's experiments have it).
        key_gate: h = sigmoid(W x), which scales what a token writes.
        read_gate: lambda = sigmoid(W x + b), which scales what a query reads of the distant past,
            0.1 at first: without it many undecayed distant keys drown the recent ones.
        output_gate, output_norm: RMSNorm(y) SiLU(W x) per head, either or both.
        routing: Who writes where and reads what: positions unless given, `HashedRouting`,
            `ContentRouting`, or another `Router`.
    """

    packs_natively = True
    reads_at_queries = True

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
        decay_scope: str = "all",
        key_gate: bool = False,
        read_gate: bool = False,
        output_gate: bool = False,
        output_norm: bool = False,
        routing: Router | None = None,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(layer_idx)
        key_heads, head_dim = head_sizes(hidden_size, num_heads, num_kv_heads, head_dim)
        self.hidden_size, self.num_heads, self.num_kv_heads = hidden_size, num_heads, key_heads
        self.head_dim, self.normalize, self.feature_map = head_dim, normalize, feature_map
        key_dim = head_dim if feature_dim is None else feature_dim
        if feature_map == "favor":
            self.feature_map, key_dim = Favor(feature_dim), head_dim
        check_choice("decay_scope", decay_scope, DECAY_SCOPES)
        self.horizon, self.decay_scope = horizon, decay_scope
        self.recipe = mask_recipe(horizon, vc_dim, chunk_size, field_size, boundary)
        self.routing: Router = PositionalRouting() if routing is None else routing
        self.extra_inputs = self.routing.extra_inputs
        self.key_dim = key_dim
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv_proj = nn.Linear(hidden_size, sum(self.widths), bias=False, **made)
        self.conv = ShortConvolution(sum(self.widths), conv_size, **made) if conv_size else None
        self.q_norm = RMSNorm(key_dim, **made) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(key_dim, **made) if qk_norm else nn.Identity()

        def linear(width: int, wanted: bool) -> nn.Linear | None:
            return nn.Linear(hidden_size, width, bias=False, **made) if wanted else None

        self.h_proj = linear(key_heads, key_gate)
        self.a_proj = linear(key_heads, decay_gate)
        if decay_gate:
            self.dt_bias = nn.Parameter(torch.empty(key_heads, **made))
            self.A_log = nn.Parameter(torch.empty(key_heads, **made))
        self.g_proj = linear(num_heads * head_dim, output_gate)
        norm = NormThenGate if output_gate else RMSNorm
        self.norm = norm(head_dim, **made) if output_norm else None
        if read_gate and isinstance(self.routing, PositionalRouting):
            raise ValueError("read_gate=True weighs types that a routing chooses; positions do not")
        logit = MemorySettings.paper().gate_logit
        self.read_gate = SigmoidGate(hidden_size, num_heads, logit) if read_gate else None
        if self.read_gate is not None:
            self.read_gate.to(**made)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False, **made)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.a_proj is not None:
            init_step_bias_(self.dt_bias)
            init_decay_rate_(self.A_log)

    @property
    def widths(self) -> list[int]:
        """Of queries, keys and values."""
        keys = self.num_kv_heads
        return [self.num_heads * self.key_dim, keys * self.key_dim, keys * self.head_dim]

    def cut_heads(self, ranks: HeadRanks) -> None:
        heads, key_heads = self.num_heads, self.num_kv_heads
        own = ranks.own(heads), ranks.own_groups(key_heads, "key heads")
        self.routing.cut_heads(ranks)
        segments = list(zip(self.widths, (heads, key_heads, key_heads), strict=True))
        ranks.cut(self.qkv_proj, *segments)
        ranks.cut(self.conv, *segments)
        for each in (self.h_proj, self.a_proj, self):
            ranks.cut(each, (key_heads, key_heads))
        ranks.share(self.q_norm, self.k_norm, self.norm)
        ranks.cut(self.g_proj, (heads * self.head_dim, heads))
        ranks.add_up(self.o_proj, heads)
        if self.read_gate is not None:
            self.read_gate.cut_heads(ranks)
        self.num_heads, self.num_kv_heads = own

    def extra_repr(self) -> str:
        return describe_mask(self.recipe, self.horizon)

    def mix(self, x: Tensor, call: CallInfo) -> tuple[Tensor, MixerCache | None]:
        if self.horizon is None and (call.use_cache or call.cu_seqlens is not None):
            return self._mix_apart(x, call)
        qkv, conv = self.qkv_proj(x), None
        if self.conv is not None:
            qkv, conv = self.conv.run(qkv, call)
        q, k, v = qkv.split(self.widths, -1)
        if call.queries is not None:
            q = q[:, call.queries]
        q = self.q_norm(q.unflatten(-1, (self.num_heads, -1)))
        k = self.k_norm(k.unflatten(-1, (self.num_kv_heads, -1)))
        v = v.unflatten(-1, (self.num_kv_heads, -1))
        mask = (
            self.recipe if self.horizon is not None else self.recipe.for_length(call.total_length)
        )
        asking = qkv[..., : self.widths[0]] if self.routing.routes_queries else x
        routing, routing_state = self.routing(asking, mask, call)
        if self.read_gate is not None:
            routing = self._weigh_reads(routing, x if call.queries is None else x[:, call.queries])
        log_decay = None
        if self.a_proj is not None:
            _, log_decay = step_and_log_decay(self.a_proj(x), self.dt_bias, self.A_log)
        key_gate = None if self.h_proj is None else self.h_proj(x).sigmoid()
        y, state = attend(
            q, k, v, self.routing.read_mask(mask), call, self.feature_map, self.normalize,
            self.decay_scope, log_decay=log_decay, key_gate=key_gate, **routing._asdict(),
        )  # fmt: skip
        x = x if call.queries is None else x[:, call.queries]
        if self.g_proj is not None:
            gate = self.g_proj(x).view_as(y)
            y = y * F.silu(gate) if self.norm is None else self.norm(y, gate)
        elif self.norm is not None:
            y = self.norm(y)
        return self.o_proj(y.flatten(-2)), call.cache(conv=conv, state=state, routing=routing_state)

    def _weigh_reads(self, routing: Routing, x: Tensor) -> Routing:
        assert self.read_gate is not None
        assert routing.query_type is not None
        weight = self.read_gate(x)
        weight = weight.view(*weight.shape, *[1] * (routing.query_type.ndim - weight.ndim))
        if routing.read_weight is not None:
            weight = weight * routing.read_weight
        return routing._replace(read_weight=weight.expand(routing.query_type.shape))

    def _mix_apart(self, x: Tensor, call: CallInfo) -> tuple[Tensor, MixerCache | None]:
        """Give every packed sequence the mask of its own length."""
        if call.use_cache or call.share is not None:
            fix = f"make the layer with a horizon, such as horizon={call.length}"
            raise ValueError(f"the mask of one input's length is nothing to decode after: {fix}")
        assert call.cu_seqlens is not None
        outputs = []
        for start, stop in itertools.pairwise(call.cu_seqlens.tolist()):
            if stop > start:
                extras = {name: each[:, start:stop] for name, each in call.extras.items()}
                alone = CallInfo(1, stop - start, x.device, extras=extras)
                outputs.append(self.mix(x[:, start:stop], alone)[0])
        out = torch.cat(outputs, 1)
        return out if call.queries is None else out[:, call.queries], None


def mask_recipe(
    horizon: int | None,
    vc_dim: int,
    chunk_size: int,
    field_size: int | None,
    boundary: BoundarySchedule | None,
) -> SMatMask:
    """Return the mask of a horizon, its boundary kept at every length; or a recipe for any length.

    >>> mask_recipe(1024, 3, 64, None, None).describe()
    'SMatMask: T = 1024, d = 3, q = 11, n = 512, c = 64, boundary = kept(512)'
    """
    if horizon is None:
        if boundary is not None and boundary.horizon_free and field_size is None and vc_dim > 1:
            named = f"a boundary {boundary.describe()}"
            raise ValueError(f"{named} has no geometry without a horizon or field_size")
        length = 1 if boundary is None else max(1, getattr(boundary, "num_distant", 1))
        return SMatMask(length, vc_dim, chunk_size, field_size, boundary)
    mask = SMatMask(horizon, vc_dim, chunk_size, field_size, boundary)
    if mask.boundary.horizon_free:
        return mask
    return SMatMask(horizon, vc_dim, chunk_size, mask.geometry.field_size, mask.schedule)
