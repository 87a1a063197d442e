"""Write addresses: a learned hash of the layer input into F_q^(d-1) (appendix "Extension Details").

    c_t = sum_l K_l h_(t-l)                      depthwise, width 4, zeros before the sequence
    z_k = gamma_k <w_k / |w_k|, LN(c_t)> + b_k   one for each head and coordinate
    s_k = clip(q Phi(z_k), 0, q - eps)           Phi the normal CDF
    x_t = (floor s_1, ..., floor s_D)            the profile

The paper's c_t is `write_input`, x_theta the profile, s `bin_position`, omega `ste_weight`. The
auxiliary loss at the end spreads addresses over all bins (appendix, "learning the hash").
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.geometry import Geometry
from smat.geometry.field import from_digits
from smat.masks import SMatMask


class WriteAddress(NamedTuple):
    """Where tokens write, `profile` (..., H), with what straight-through weight (..., H).

    `bin_position` (..., H, D) is s of the paper, from which the balance loss is computed.
    """

    profile: Tensor
    ste_weight: Tensor
    bin_position: Tensor


class HashProjection(nn.Module):
    """Hash write-side representations into the points of one geometry, for each head.

    >>> projection = HashProjection(hidden_size=8, num_heads=2, geometry=Geometry(3, 5))
    >>> address = projection(torch.randn(4, 10, 8))
    >>> address.profile.shape, bool((address.ste_weight == 1).all())
    (torch.Size([4, 10, 2]), True)

    omega = prod_k [1 + (1 - f_k) - sg(1 - f_k)] is 1, and its derivative by s_k is -1: a one-sided,
    biased estimate. A loss that gains from a larger write pulls s towards the bin's lower edge.
    Input that is not finite gives a weight that is not. Cost: T hidden_size (d - 1) a head.
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
        """Draw directions at random; gain 1 and bias 0 spread a normal input over all bins."""
        nn.init.normal_(self.weight)
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)

    def forward(self, write_input: Tensor) -> WriteAddress:
        """Hash (..., hidden_size)."""
        position = self.bin_position(write_input)
        lower = position.detach().floor()
        remaining = 1 - (position - lower)
        # In this order the sum is exactly 1.
        ste_weight = (1 + (remaining - remaining.detach())).prod(-1)
        profile = from_digits(lower.nan_to_num(nan=0.0).long(), self.geometry.field_size)
        return WriteAddress(profile, ste_weight, position)

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


def balance_loss(bin_position: Tensor, field_size: int, counted: Tensor | None = None) -> Tensor:
    """Measure how unevenly coordinates are used: 0 if evenly, log q if one bin takes all.

    >>> balance_loss(torch.arange(5.0).view(1, 5, 1, 1), field_size=5)
    tensor(0.)
    >>> balance_loss(torch.zeros(1, 5, 1, 1), field_size=5).exp()
    tensor(5.)

    L_bal = 1/D sum_k sum_b p_kb log(q p_kb), p_kb the average over the counted tokens of the soft
    mass 1 - f at the token's bin and f at the next (the last bin keeps both); averaged over heads.

    `bin_position` is (B, T, H, D); `counted` (B, T) marks the tokens that count: distant ones, and
    no padding. Without any, or at d = 1, the loss is 0. O(B T H D + H D q).
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
    mean = mass / weight.sum().clamp(min=1)
    # An empty bin has no part in the sum, and no infinite slope.
    logs = (field_size * mean).clamp(min=torch.finfo(mean.dtype).tiny).log()
    return (mean * logs).sum() / max(1, heads * ambient_dim)


def balance_weight(step: int, weight: float = 0.01, anneal_steps: int = 1000) -> float:
    """Return beta_bal at a training step: it falls linearly to 0 and stays there.

    >>> [balance_weight(step) for step in (0, 500, 1000, 5000)]
    [0.01, 0.005, 0.0, 0.0]

    `anneal_steps=0` keeps the weight for ever.
    """
    if step < 0 or anneal_steps < 0:
        raise ValueError(f"steps must not be negative, got {step} and {anneal_steps}")
    return weight if anneal_steps == 0 else weight * max(0.0, 1 - step / anneal_steps)


def distant_tokens(
    mask: SMatMask,
    batch: int,
    length: int,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Mark the tokens that are distant for some query, and no padding: (B, T) bool.

    >>> mask = SMatMask(seq_len=8, vc_dim=2, chunk_size=2, field_size=2)
    >>> distant_tokens(mask, 1, 6, torch.tensor([[0, 1, 1, 1, 1, 1]])).int()
    tensor([[0, 1, 1, 1, 1, 0]], dtype=torch.int32)

    A row of real tokens that ends before the boundary has none.
    """
    if cu_seqlens is not None:
        edges = itertools.pairwise(cu_seqlens.tolist())
        marks = [_leading(mask.for_length(b - a), b - a) for a, b in edges if b > a]
        return torch.cat(marks).to(cu_seqlens.device).unsqueeze(0)
    if attention_mask is None:
        return _leading(mask, length).expand(batch, -1)
    real = attention_mask.bool()
    after = F.pad(mask.boundaries(length, real.device), (1, 0))  # n by the number of real tokens
    return real & (real.cumsum(1) <= after[real.sum(1)].unsqueeze(1))


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


def _leading(mask: SMatMask, length: int) -> Tensor:
    return torch.arange(length) < mask.schedule.boundary_at(length - 1)
