"""Learned content routing: where tokens write and which types they read (Section 3, end).

Write addresses are a learned hash of the layer input into F_q^(d-1) (appendix "Extension Details"):

    c_t = sum_l K_l h_(t-l)                      depthwise, width 4, zeros before the sequence
    z_k = gamma_k <w_k / |w_k|, LN(c_t)> + b_k   one for each head and coordinate
    s_k = clip(q Phi(z_k), 0, q - eps)           Phi the normal CDF
    x_t = (floor s_1, ..., floor s_D)            the profile

The paper's c_t is `write_input`, x_theta the profile, s `bin_position`, omega `ste_weight`. What is
read stands in selectors.py and request.py, what spreads addresses in routers.py and balance.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.distributed import HeadRanks
from smat.geometry import Geometry
from smat.geometry.field import from_digits
from smat.layers.call import with_past
from smat.layers.mixer import reset_children
from smat.layers.primitives import keep_from_decay_
from smat.layers.routing.selector_names import SELECTORS
from smat.layers.routing.selectors import TopTypes, point_mask
from smat.layers.routing.starts import align_scorer_, start_taps_, sum_last_taps_
from smat.layers.short_convolution import ShortConvolution, convolve, last_inputs
from smat.masks import SMatMask
from smat.ops.smat.routing import Routing

AVERAGE_SCALE = 4.0  # of the scorer where the hash averages four tokens, each a fourth of z


class LearnedRouting(nn.Module):
    """The learned routing of one layer.

    >>> learned = LearnedRouting(hidden_size=8, num_heads=2, geometry=Geometry(3, 3))
    >>> hidden = torch.randn(4, 64, 8)
    >>> routing, bin_position = learned(hidden)
    >>> routing.profile.shape, routing.query_type.shape
    (torch.Size([4, 64, 2]), torch.Size([4, 64, 2, 4]))
    >>> state = learned.next_state(hidden[:, :63])  # decoding carries the last inputs alone
    >>> torch.equal(learned(hidden[:, 63:], state=state)[0].profile, routing.profile[:, 63:])
    True

    `geometry` is the one of a horizon, so that one set of parameters serves every length; or
    several, each with its own hash and scorer, as the paper's recall models have one for every
    training length. `selector` names one of `SELECTORS`: "top_types" (the paper's four reads),
    "factored", "own_hyperplane", "own_cell", "request", the hyperplane through the points of the
    last `request_tokens` tokens, or "learned_request", through those of them that are asked for.

    An address depends on its own token and the three before it, over the boundary of the local
    branch too. `router_init`, `selector_conv`, `request_tokens` and `request_noise` are those of
    `MemorySettings`; with `detached` no gradient of what is written reaches the hash, only that of
    a balance loss.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        geometry: Geometry | Iterable[Geometry],
        *,
        selector: str = "top_types",
        num_reads: int = 4,
        conv_width: int = 4,
        router_init: str = "random",
        selector_conv: int = 0,
        request_tokens: int = 1,
        request_noise: float = 0.0,
        detached: bool = False,
    ) -> None:
        super().__init__()
        if selector not in SELECTORS:
            raise ValueError(f"selector must be one of {', '.join(SELECTORS)}, got {selector!r}")
        reads_request = SELECTORS[selector].reads_request
        if not reads_request and request_tokens > max(1, selector_conv):
            taps = f"a convolution of {selector_conv} before the scorer, got {request_tokens}"
            raise ValueError(f"request_tokens must fit the taps of {taps}")
        if reads_request and (conv_width < 2 or selector_conv):
            needs = "a conv_width of 2 or more and no selector_conv"
            raise ValueError(f"a request needs {needs}, got {conv_width} and {selector_conv}")
        several = [geometry] if isinstance(geometry, Geometry) else list(geometry)
        if len({each.vc_dim for each in several}) != 1:
            raise ValueError(f"one VC dimension and at least one field size, got {several}")
        by_size = {each.field_size: each for each in several}
        keyed = [(str(size), each) for size, each in sorted(by_size.items())]
        self.num_heads, self.kind = num_heads, SELECTORS[selector]
        self.conv = ShortConvolution(hidden_size, conv_width, activation=False)
        sizes = (hidden_size, num_heads)
        self.projections = nn.ModuleDict({key: HashProjection(*sizes, each) for key, each in keyed})
        reads: dict[str, Any] = {"num_reads": num_reads}
        if reads_request:
            reads |= {"request_tokens": request_tokens, "noise": request_noise}
        self.selectors = nn.ModuleDict(
            {key: self.kind(*sizes, each, **reads) for key, each in keyed}
        )
        self.router_init, self.num_kept = router_init, max(conv_width, selector_conv) - 1
        self.selector_conv, self.request_tokens = None, request_tokens
        self.detached = detached
        self.conv.weight.requires_grad_(not detached)  # evenness alone says nothing of what to hash
        if reads_request:  # the tokens asked for, and what their addresses look back to
            self.num_kept = max(self.num_kept, request_tokens - 1 + conv_width - 2)
        if selector_conv:
            self.selector_conv = ShortConvolution(hidden_size, selector_conv, activation=False)
        self._start()

    def reset_parameters(self) -> None:
        reset_children(self)
        self._start()

    def cut_heads(self, ranks: HeadRanks) -> None:
        """Keep the hashes and scorers of this rank's heads; they share what is convolved."""
        ranks.share(self.conv, self.selector_conv)
        by_field: list[Any] = [*self.projections.values(), *self.selectors.values()]
        for module in by_field:
            module.cut_heads(ranks)

    def _start(self) -> None:
        """Let write and read addresses agree, unless the draw is to stay; see `MemorySettings`."""
        if self.router_init == "random" or self.kind.needs_own_profile:
            return
        start_taps_(self.conv.weight, self.router_init)
        if self.selector_conv is not None:
            sum_last_taps_(self.selector_conv.weight, self.request_tokens)
        scale = AVERAGE_SCALE if self.router_init == "average" else 1.0
        for key, selector in self.selectors.items():
            hashed = self.projections[key]
            if isinstance(selector, TopTypes) and isinstance(hashed, HashProjection):
                align_scorer_(selector.scorer, hashed.weight, hashed.gain, hashed.geometry, scale)

    def forward(
        self,
        hidden: Tensor,
        geometry: Geometry | None = None,
        state: Tensor | None = None,
        first_visible: Tensor | None = None,
        queries: slice | Tensor = slice(None),
        num_writers: int | None = None,
    ) -> tuple[Routing, Tensor]:
        """Route (B, T, hidden_size); reads are selected at the positions of `queries`.

        With the routing come the bin positions (B, T, H, D), for the balance loss. The geometry may
        stay out if there is only one. `state` holds the inputs before these (`next_state`), and
        `first_visible` (1, T) keeps packed sequences apart. Only the first `num_writers` tokens
        get an address, unless the selector wants their own points; the others write nothing.
        """
        length = hidden.shape[1]
        if num_writers is None or self.kind.needs_own_profile:
            num_writers = length
        key = self._key(geometry)
        write_input = _after(self.conv, hidden[:, :num_writers], state, first_visible)
        if self.detached:
            write_input = write_input.detach()
        address = self.projections[key](write_input)
        if num_writers < length:
            behind = [0, length - num_writers]
            address = [F.pad(x, [0, 0] * (x.ndim - 2) + behind) for x in address]
        profile, ste_weight, bin_position = address
        if self.detached:
            ste_weight = ste_weight.detach()
        if self.kind.reads_request:
            cells = self.request_cells(hidden, key, state, first_visible, queries)
            reads = self.selectors[key](hidden[:, queries], cells)
            return reads._replace(profile=profile, write_weight=ste_weight), bin_position
        if self.kind.needs_own_profile:  # a direction comes from what the point comes from
            hidden = write_input
        elif self.selector_conv is not None:
            hidden = _after(self.selector_conv, hidden, state, first_visible)
        reads = self.selectors[key](hidden[:, queries], profile[:, queries])
        return reads._replace(profile=profile, write_weight=ste_weight), bin_position

    @torch.no_grad()
    def request_cells(
        self,
        hidden: Tensor,
        key: str,
        state: Tensor | None,
        first_visible: Tensor | None,
        queries: slice | Tensor,
    ) -> Tensor:
        """Return the points of the last `request_tokens` tokens, the own first: (B, R, H, k).

        A token's point is the one under which the token behind it is filed, but for what that one
        adds itself: with the hash's start as "previous_token", the point of its key. A token before
        the sequence counts as zeros.
        """
        projection: Any = self.projections[key]
        before, reach = self.request_tokens - 1, self.conv.width - 2
        past = before + reach
        if state is not None:
            state = state[:, state.shape[1] - past :]
        row = torch.arange(hidden.shape[1], device=hidden.device)[queries]
        first = first_visible
        if first is not None:
            first = torch.cat([first.new_zeros(len(first), past), first + past], 1)
        history = with_past(hidden, past, state)
        named = convolve(history, self.conv.weight[:, :-1], None, False, first)[:, reach:]
        cells = []
        for lag in range(self.request_tokens):
            each = named[:, row + (before - lag)]
            if first_visible is not None:
                each = each.masked_fill((row - lag < first_visible[:, row]).unsqueeze(-1), 0)
            bins = projection.bin_position(each).floor().nan_to_num(nan=0.0).long()
            cells.append(from_digits(bins, projection.geometry.field_size))
        return torch.stack(cells, -1)

    def next_state(
        self,
        x: Tensor,
        state: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Keep the last inputs that a convolution looks back to, of every row or sequence."""
        return last_inputs(x, self.num_kept, state, lengths, cu_seqlens)

    def _key(self, geometry: Geometry | None) -> str:
        if geometry is None and len(self.selectors) == 1:
            return next(iter(self.selectors))
        key = None if geometry is None else str(geometry.field_size)
        if key is None or key not in self.selectors:
            known, given = ", ".join(self.selectors), f"field size {key}" if key else "no geometry"
            raise ValueError(f"parameters exist for the field sizes {known}, got {given}")
        return key

    def read_mask(self, mask: SMatMask) -> SMatMask:
        """Return the mask under which the selected types are to be read."""
        return point_mask(mask) if self.kind.reads_points else mask


def _after(conv: ShortConvolution, x: Tensor, state: Tensor | None, first: Tensor | None) -> Tensor:
    """Convolve after those inputs of a state that the convolution looks back to."""
    if state is not None:
        state = state[:, state.shape[1] - (conv.width - 1) :]
    return conv(x, state, first)


class HashProjection(nn.Module):
    """Hash write-side representations into the points of one geometry, for each head.

    >>> projection = HashProjection(hidden_size=8, num_heads=2, geometry=Geometry(3, 5))
    >>> profile, ste_weight, bin_position = projection(torch.randn(4, 10, 8))
    >>> profile.shape, bool((ste_weight == 1).all())
    (torch.Size([4, 10, 2]), True)

    omega = prod_k [1 + (1 - f_k) - sg(1 - f_k)] is 1, and its derivative by s_k is -1: a one-sided,
    biased estimate. Input that is not finite gives a weight that is not.
    Paper: w = `weight`, gamma = `gain`, b = `bias`.
    """

    def __init__(self, hidden_size: int, num_heads: int, geometry: Geometry) -> None:
        super().__init__()
        if hidden_size < 1 or num_heads < 1:
            raise ValueError(f"sizes must be 1 or more, got {hidden_size} and {num_heads} heads")
        self.geometry = geometry
        shape = (num_heads, geometry.ambient_dim)
        self.weight = nn.Parameter(torch.empty(*shape, hidden_size))
        self.gain = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        # With bias 0 it spreads a normal input over all bins; decayed to 0 it puts all into one.
        keep_from_decay_(nn.init.ones_(self.gain))
        nn.init.zeros_(self.bias)

    def cut_heads(self, ranks: HeadRanks) -> None:
        ranks.cut(self, (len(self.gain), len(self.gain)))

    def forward(self, write_input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hash (..., hidden_size): profile and straight-through weight (..., H), bin position."""
        position = self.bin_position(write_input)
        lower = position.detach().floor()
        remaining = 1 - (position - lower)
        # In this order the sum is exactly 1.
        ste_weight = (1 + (remaining - remaining.detach())).prod(-1)
        profile = from_digits(lower.nan_to_num(nan=0.0).long(), self.geometry.field_size)
        return profile, ste_weight, position

    def bin_position(self, write_input: Tensor) -> Tensor:
        """Find s, (..., hidden_size) -> (..., H, D), in [0, q)."""
        dtype = torch.promote_types(write_input.dtype, torch.float32)
        with torch.autocast(write_input.device.type, enabled=False):
            normed = F.layer_norm(write_input.to(dtype), write_input.shape[-1:])
            direction = F.normalize(self.weight.to(dtype), dim=-1)
            along = F.linear(normed, direction.flatten(0, 1)).unflatten(-1, self.gain.shape)
            z = self.gain.to(dtype) * along + self.bias.to(dtype)
            field_size = self.geometry.field_size
            last = field_size * (1 - 2 * torch.finfo(dtype).eps)
            return (field_size * torch.special.ndtr(z)).clamp(0, last)
