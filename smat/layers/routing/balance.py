"""The loss that spreads write addresses over all bins (appendix "Learning the discrete hash")."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.distributed import Share
from smat.distributed.exchange import total
from smat.layers.call import CallInfo
from smat.masks import SMatMask


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
    mean = total(mass, share) / total(weight.sum(), share).clamp(min=1)
    # An empty bin has no part in the sum, and no infinite slope.
    logs = (field_size * mean).clamp(min=torch.finfo(mean.dtype).tiny).log()
    return (mean * logs).sum() / max(1, heads * ambient_dim)


def balance_weight(step: int, weight: float = 0.01, anneal_steps: int = 1000) -> float:
    """Return beta_bal at a training step: it falls linearly to 0, or never in 0 steps.

    >>> [balance_weight(step) for step in (0, 500, 1000, 5000)]
    [0.01, 0.005, 0.0, 0.0]
    """
    if step < 0 or anneal_steps < 0:
        raise ValueError(f"steps must not be negative, got {step} and {anneal_steps}")
    return weight if anneal_steps == 0 else weight * max(0.0, 1 - step / anneal_steps)


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


def sum_balance_losses(model: nn.Module) -> Tensor | None:
    """Add up the losses that routed layers of a model left after its last call; None without any.

    >>> layer = nn.Linear(1, 1)
    >>> layer.balance_loss = torch.tensor(0.5)  # as memories, content routings and routers do
    >>> sum_balance_losses(nn.Sequential(layer, nn.Linear(1, 1)))
    tensor(0.5000)
    """
    losses = [getattr(module, "balance_loss", None) for module in model.modules()]
    found = [loss for loss in losses if isinstance(loss, Tensor)]
    return torch.stack(found).sum() if found else None
