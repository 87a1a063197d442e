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

from smat.distributed import HeadRanks
from smat.layers.call import CallInfo
from smat.layers.memory.settings import MemorySettings
from smat.layers.memory.transport import DeltaTokens, boundary_of
from smat.layers.primitives import describe_mask
from smat.layers.routing.balance import hyperplane_balance
from smat.layers.routing.learned import LearnedRouting
from smat.layers.routing.routers import ContentRouting, distant_tokens, neighbour_routings
from smat.masks import BoundarySchedule, SMatMask, kept
from smat.ops.smat.routing import Routing

MIN_STEP = 1e-6  # a smaller step writes less than its input


class SigmoidGate(nn.Module):
    """A gate in (0, 1) for every token and head, that begins about the sigmoid of a logit.

    >>> gate = SigmoidGate(hidden_size=64, num_heads=2, logit=0.0, head_logit=True)
    >>> gate(torch.zeros(1, 64))
    tensor([[0.5000, 0.5000]], grad_fn=<SigmoidBackward0>)

    sigmoid(W h + b), plus a logit for every head: the read gate has one beside its bias.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, logit: float, head_logit: bool = False
    ) -> None:
        super().__init__()
        self.logit = logit
        self.linear = nn.Linear(hidden_size, num_heads)
        self.head_logit = nn.Parameter(torch.empty(num_heads)) if head_logit else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        nn.init.constant_(self.linear.bias, self.logit)
        if self.head_logit is not None:
            nn.init.zeros_(self.head_logit)

    def cut_heads(self, ranks: HeadRanks) -> None:
        heads = self.linear.out_features
        ranks.cut(self.linear, (heads, heads))
        ranks.cut(self, (heads, heads))

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
    `settings` say how it is written and where it starts, `MemorySettings` or "paper"; `learned` are
    the options of `LearnedRouting`. `ProfileMemory` is for Mamba-2, `TransportedMemory` for Gated
    DeltaNet.
    """

    has_write_gate = False

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        mask: SMatMask,
        *,
        other_masks: Sequence[SMatMask] = (),
        settings: MemorySettings | str = "default",
        **learned: Any,
    ) -> None:
        chosen = MemorySettings.named(settings)
        geometries = [each.geometry for each in (mask, *other_masks)]
        learned["router_init"] = chosen.router_init
        learned["selector_conv"] = chosen.selector_conv
        learned["request_tokens"] = chosen.request_tokens
        learned["request_noise"] = chosen.request_noise
        learned["detached"] = chosen.straight_through == "none"
        super().__init__(LearnedRouting(hidden_size, num_heads, geometries, **learned))
        self.hidden_size, self.num_heads, self.settings = hidden_size, num_heads, chosen
        self.mask, self.masks = mask, (mask, *other_masks)
        self.mask_by_length: dict[int, SMatMask] = {}
        sizes = (hidden_size, num_heads, chosen.gate_logit)
        self.read_gate = SigmoidGate(*sizes, head_logit=True)
        self.write_gate = SigmoidGate(*sizes) if self.has_write_gate else None

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

    @classmethod
    def for_horizon(
        cls,
        hidden_size: int,
        num_heads: int,
        *,
        vc_dim: int,
        horizon: int,
        boundary: BoundarySchedule | None = None,
        chunk_size: int | None = None,
        **options: Any,
    ) -> Self:
        """Make a memory with the geometry of a horizon, half of which is distant unless told.

        >>> Memory.for_horizon(8, 2, vc_dim=3, horizon=1024).mask.describe()
        'SMatMask: T = 1024, d = 3, q = 11, n = 512, c = 256, boundary = kept(512)'
        """
        mask = kept_mask(horizon, vc_dim, chunk_size)
        if boundary is not None:
            field_size = mask.geometry.field_size
            mask = SMatMask(horizon, vc_dim, mask.chunk_size, field_size, boundary)
        return cls(hidden_size, num_heads, mask, **options)

    def cut_heads(self, ranks: HeadRanks) -> None:
        super().cut_heads(ranks)
        for gate in (self.read_gate, self.write_gate):
            if gate is not None:
                gate.cut_heads(ranks)
        self.num_heads = ranks.own(self.num_heads)

    def extra_repr(self) -> str:
        return f"{describe_mask(self.mask, self.mask.seq_len)}, {self.settings}"

    def check_layer(self, hidden_size: int, num_heads: int) -> None:
        """Refuse a layer of other sizes, and masks that its recurrence cannot follow."""
        if (hidden_size, num_heads) != (self.hidden_size, self.num_heads):
            own = f"a memory of width {self.hidden_size} with {self.num_heads} heads"
            raise ValueError(f"{own} does not fit a layer of {hidden_size} with {num_heads} heads")
        for mask in self.masks:
            self.check_mask(mask)

    def check_mask(self, mask: SMatMask) -> None:
        """Refuse a mask that the recurrence beside this memory cannot follow."""

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
        return masks[min((each for each in masks if each >= call.total_length), default=max(masks))]

    def route(
        self, x: Tensor, mask: SMatMask, call: CallInfo
    ) -> tuple[Routing, Tensor, Tensor | None]:
        """Route the tokens of a call, with weights times gates: see `ContentRouting.route`."""
        routing, bin_position, state = super().route(x, mask, call)
        assert routing.read_weight is not None
        asking = x if call.queries is None else x[:, call.queries]
        weights = {"read_weight": routing.read_weight * self.read_gate(asking).unsqueeze(-1)}
        if self.write_gate is not None:
            weights["write_weight"] = routing.write_weight * self.write_gate(x)
        return routing._replace(**weights), bin_position, state

    def measure_balance(
        self, x: Tensor, bin_position: Tensor, mask: SMatMask, call: CallInfo
    ) -> Tensor:
        """Measure what is written, by bins of coordinates or by hyperplanes: see the settings."""
        if self.settings.balance == "coordinates":
            return super().measure_balance(x, bin_position, mask, call)
        weight = distant_tokens(mask, call).unsqueeze(-1)
        if self.write_gate is not None:
            weight = weight * self.write_gate(x).detach()
        return hyperplane_balance(bin_position, mask.geometry, weight, call.share)

    def neighbours(
        self, routing: Routing, bin_position: Tensor, mask: SMatMask
    ) -> tuple[Routing, ...]:
        """Return who would write to neighbouring bins, where a gradient is to pass through them."""
        if self.settings.straight_through != "neighbour" or not bin_position.requires_grad:
            return ()
        return neighbour_routings(routing, bin_position, mask.geometry)


class ProfileMemory(Memory):
    """The memory of a backbone with a scalar decay, Mamba-2: a gate weighs what is written."""

    has_write_gate = True

    def check_mask(self, mask: SMatMask) -> None:
        if not mask.boundary.horizon_free:
            fitting = f"a boundary without horizon, such as kept({mask.num_distant})"
            raise ValueError(f"a memory needs {fitting}, got {mask.describe()}")

    @property
    def decay_scope(self) -> str:
        """What decays of the attention that the backbone and this memory make together."""
        return "all" if self.settings.memory_decay == "backbone" else "recurrent"

    def weigh_values(self, routing: Routing, step: Tensor) -> Routing:
        """Let values step x be written as x, if the settings say so, by weights over the step."""
        if self.settings.memory_value == "step":
            return routing
        assert routing.write_weight is not None
        return routing._replace(write_weight=routing.write_weight / step.clamp(min=MIN_STEP))


class TransportedMemory(Memory):
    """The memory of a delta-rule backbone, Gated DeltaNet, whose beta weighs what is written."""

    def check_mask(self, mask: SMatMask) -> None:
        boundary_of(mask)

    @property
    def erases(self) -> bool:
        """Whether k k' of later tokens takes something from what was written."""
        return self.settings.memory_decay != "none"

    def tokens_of(self, tokens: DeltaTokens) -> DeltaTokens:
        """Take from a backbone's tokens the decay that this memory does without."""
        kept = self.settings.memory_decay == "backbone"
        return tokens if kept else tokens._replace(log_decay=None)


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
