"""Who writes where and who reads what in SMat-Attention: by position, and by content."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.distributed import HeadRanks, Share
from smat.distributed.exchange import total
from smat.geometry import Geometry
from smat.geometry.field import from_digits
from smat.layers.call import CallInfo
from smat.layers.routing.learned import LearnedRouting
from smat.masks import SMatMask
from smat.ops.smat.routing import POSITIONAL, Routing


class Router(nn.Module):
    """What a layer asks of a routing module."""

    extra_inputs: tuple[str, ...] = ()  # what it takes of a layer's arguments
    routes_queries = False  # whether it is given a layer's queries instead of the layer's input

    def read_mask(self, mask: SMatMask) -> SMatMask:
        """Return the mask under which the types are read."""
        return mask

    def cut_heads(self, ranks: HeadRanks) -> None:
        """Route for the heads of this rank alone."""
        raise ValueError(
            f"{type(self).__name__} does not route for some heads of {ranks.size} ranks"
        )

    def forward(self, x: Tensor, mask: SMatMask, call: CallInfo) -> tuple[Routing, Tensor | None]:
        """Route the tokens of a call; ``call.before("routing")`` is the state before them.

        What is read is told for ``call.queries`` alone, if there are any.
        """
        return POSITIONAL, None


class PositionalRouting(Router):
    """Profiles and types dealt out in turn: everything is left to the positions."""

    def cut_heads(self, ranks: HeadRanks) -> None:
        """Do nothing: every head has the same positions."""


class ContentRouting(Router):
    """Route tokens by what the layer's input says, with any selector of `LearnedRouting`.

    >>> mask = SMatMask(64, vc_dim=3, chunk_size=16, field_size=3)
    >>> router = ContentRouting(LearnedRouting(8, num_heads=2, geometry=mask.geometry))
    >>> routing, _ = router(torch.randn(1, 64, 8), mask, CallInfo(1, 64, torch.device("cpu")))
    >>> routing.profile.shape, routing.query_type.shape
    (torch.Size([1, 64, 2]), torch.Size([1, 64, 2, 4]))

    After a call that begins sequences `balance_loss` holds the loss of the hash, with its gradient,
    for the training loop to add: `sum_balance_losses`.
    """

    def __init__(self, learned: LearnedRouting) -> None:
        super().__init__()
        self.learned = learned
        self.balance_loss: Tensor | None = None
        self.ranks: HeadRanks | None = None  # that share its heads

    def __getstate__(self) -> dict[str, Any]:
        """Leave the last loss behind where a layer is copied or saved: it belongs to a graph."""
        return {**self.__dict__, "balance_loss": None}

    def read_mask(self, mask: SMatMask) -> SMatMask:
        return self.learned.read_mask(mask)

    def cut_heads(self, ranks: HeadRanks) -> None:
        self.learned.cut_heads(ranks)
        self.ranks = ranks

    def forward(self, x: Tensor, mask: SMatMask, call: CallInfo) -> tuple[Routing, Tensor | None]:
        routing, _, state = self.route(x, mask, call)
        return routing, state

    def route(
        self, x: Tensor, mask: SMatMask, call: CallInfo
    ) -> tuple[Routing, Tensor, Tensor | None]:
        """Route the tokens of a call, with bin positions and the state of the convolutions.

        Of new sequences only those queries select that see something distant, and only those
        tokens get an address that are distant for some query, or may be for a later one.
        """
        past = call.inputs_before("routing", x, self.learned.num_kept)
        queries, num_writers, first = queries_of(call), None, 0
        if past is None and call.cu_seqlens is None:
            segments = mask.segments(call.length)
            if not call.use_cache:
                num_writers = segments[-1].boundary
            if call.queries is None:
                first = next((each.start for each in segments if each.boundary > 0), call.length)
                queries = slice(first, None)
        routing, bin_position = self.learned(
            x, mask.geometry, past, call.first_visible(), queries, num_writers
        )
        if call.past is None:
            loss = self.measure_balance(x, bin_position, mask, call)
            self.balance_loss = loss if self.ranks is None else self.ranks.mean(loss)
        state = None
        if call.use_cache:
            before = None if past is None else past.detach()
            state = self.learned.next_state(x.detach(), before, call.lengths, call.cu_seqlens)
        if first:
            reads = (routing.query_type, routing.read_weight)
            query_type, read_weight = (F.pad(each, (0, 0, 0, 0, first, 0)) for each in reads)
            routing = routing._replace(query_type=query_type, read_weight=read_weight)
        return routing, bin_position, state

    def measure_balance(
        self, x: Tensor, bin_position: Tensor, mask: SMatMask, call: CallInfo
    ) -> Tensor:
        """Say how unevenly the distant tokens of a call are spread: the loss of the hash."""
        distant = distant_tokens(mask, call)
        return balance_loss(bin_position, mask.geometry.field_size, distant, call.share)


def balance_loss(
    bin_position: Tensor,
    field_size: int,
    counted: Tensor | None = None,
    share: Share | None = None,
) -> Tensor:
    """Measure how unevenly coordinates are used: 0 if evenly, log q if one bin takes all.

    >>> balance_loss(torch.arange(5.0).view(1, 5, 1, 1), field_size=5)
    tensor(0.)
    >>> balance_loss(torch.zeros(1, 5, 1, 1), field_size=5).exp()
    tensor(5.)

    L_bal = 1/D sum_k sum_b p_kb log(q p_kb), p_kb the average over the counted tokens of the soft
    mass 1 - f at the token's bin and f at the next (the last bin keeps both); averaged over heads.

    `bin_position` is (B, T, H, D); `counted` (B, T) marks the tokens that count: distant ones, and
    no padding. Without any, or at d = 1, the loss is 0. O(B T H D + H D q). Averages run over the
    tokens of all ranks of a `share`, and the loss is that of all of them, on each.
    """
    heads, ambient_dim = bin_position.shape[-2:]
    if counted is None:
        counted = bin_position.new_ones(bin_position.shape[:2], dtype=torch.bool)
    position = bin_position.masked_fill(~counted.bool()[..., None, None], 0)
    lower = position.detach().floor()
    beyond, weight = position - lower, counted.to(position.dtype)[..., None, None]
    column = torch.arange(heads * ambient_dim, device=position.device).view(heads, ambient_dim)
    bins = lower.nan_to_num(nan=0.0).long().clamp(0, field_size - 1)
    mass = position.new_zeros(heads * ambient_dim * field_size)
    for index, amount in ((bins, 1 - beyond), ((bins + 1).clamp(max=field_size - 1), beyond)):
        where = (column * field_size + index).flatten()
        mass = mass.index_add(0, where, (weight * amount).flatten())
    count = weight.sum()
    if share is not None:
        mass, count = total(mass, share), total(count, share)
    mean = mass / count.clamp(min=1)
    # An empty bin has no part in the sum, and no infinite slope.
    logs = (field_size * mean).clamp(min=torch.finfo(mean.dtype).tiny).log()
    return (mean * logs).sum() / max(1, heads * ambient_dim)


def distant_tokens(mask: SMatMask, call: CallInfo) -> Tensor:
    """Mark the tokens that are distant for some query, and no padding: (B, T) bool.

    >>> mask = SMatMask(seq_len=8, vc_dim=2, chunk_size=2, field_size=2)
    >>> real = torch.tensor([[True, True, True, True, True, False]])
    >>> distant_tokens(mask, CallInfo(1, 6, real.device, real)).int()
    tensor([[1, 1, 1, 1, 0, 0]], dtype=torch.int32)

    A row of real tokens that ends before the boundary has none.
    """
    token = torch.arange(call.length, device=call.device)
    if call.share is not None:
        limits = [mask.for_length(x.length).schedule.boundary_at(x.length - 1)
                  if call.cu_seqlens is not None else mask.schedule.boundary_at(x.length - 1)
                  for x in call.pieces()]  # fmt: skip
        if call.rows is not None:
            distant = call.positions() < torch.tensor(limits, device=call.device).unsqueeze(1)
            return distant if call.real is None else distant & call.real
        sizes = torch.tensor([x.stop - x.start for x in call.pieces()], device=call.device)
        limit = torch.tensor(limits, device=call.device).repeat_interleave(sizes)
        return (call.positions() < limit).expand(call.batch, -1)
    if call.cu_seqlens is not None:
        lengths = [each for each in call.num_tokens.tolist() if each]
        marks = [token[:n] < mask.for_length(n).schedule.boundary_at(n - 1) for n in lengths]
        return torch.cat(marks).unsqueeze(0)
    if call.real is None:
        return (token < mask.schedule.boundary_at(call.length - 1)).expand(call.batch, -1)
    # n by the number of real tokens
    after = F.pad(mask.boundaries(call.length, call.device), (1, 0))
    return call.real & (token < after[call.real.sum(1)].unsqueeze(1))


def neighbour_routings(
    routing: Routing, bin_position: Tensor, geometry: Geometry
) -> tuple[Routing, ...]:
    """Return a routing for each coordinate, that writes to the next bin with a weight of 0.

    >>> position = torch.tensor([[[[0.5, 2.5]]]], requires_grad=True)  # bins 0 and 2 of 3
    >>> found = neighbour_routings(Routing(), position, Geometry(3, 3))
    >>> [each.profile.item() for each in found], found[0].write_weight.item()
    ([5, 2], 0.0)

    Interpolation would write 1 - f to a token's own bin and f to the next one of a coordinate
    (appendix "Learning the discrete hash"). Rounded to 1 and 0 only the slopes stay: -1 in the own
    bin, which `ste_weight` has, and +1 in the next. The last bin is its own neighbour: there the
    slopes cancel, as in the paper's min(a + 1, q - 1).
    """
    lower = bin_position.detach().floor().nan_to_num(nan=0.0).long()
    last, detached = (
        geometry.field_size - 1,
        Routing(*(x if x is None else x.detach() for x in routing)),
    )
    found = []
    for axis in range(geometry.ambient_dim):
        digits = lower.clone()
        digits[..., axis] = (digits[..., axis] + 1).clamp(max=last)
        along = bin_position[..., axis]
        weight = along - along.detach()
        if detached.write_weight is not None:
            weight = weight * detached.write_weight
        profile = from_digits(digits, geometry.field_size)
        found.append(detached._replace(profile=profile, write_weight=weight))
    return tuple(found)


def queries_of(call: CallInfo) -> slice | Tensor:
    return slice(None) if call.queries is None else call.queries
