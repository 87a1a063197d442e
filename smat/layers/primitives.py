"""What several layers share: norms, rotary positions, gates, widths of heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from smat.distributed import HeadRanks
from smat.masks import SMatMask

TILE_ELEMENTS = 1 << 16  # that are normalised together


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale vectors to length 1: x (sum x^2 + eps)^(-1/2).

    >>> l2_norm(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


class RMSNorm(nn.Module):
    """Divide by the root of the mean square, group by group, and scale by a learned weight.

    >>> RMSNorm(2)(torch.tensor([3.0, -3.0])).tolist()
    [0.999999..., -0.999999...]
    """

    def __init__(self, width: int, eps: float = 1e-5, num_groups: int = 1, **made: Any) -> None:
        super().__init__()
        if width % num_groups:
            raise ValueError(f"a width of {width} does not fall into {num_groups} groups")
        self.eps, self.num_groups = eps, num_groups
        self.ranks: HeadRanks | None = None  # that share a group
        self.weight = nn.Parameter(torch.empty(width, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def cut_heads(self, ranks: HeadRanks, heads: int) -> None:
        """Keep the width of this rank's heads; of a group that others share all add up squares."""
        own_groups = ranks.own_groups(self.num_groups, "groups of the norm")
        ranks.cut(self, (len(self.weight), heads))
        if self.num_groups % ranks.size:
            self.ranks = ranks
        else:
            self.num_groups = own_groups

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks is not None:
            return _rms_norm_over_ranks(x, self.weight, self.eps, self.num_groups, self.ranks)
        return rms_norm(x, self.weight, self.eps, self.num_groups)


class NormThenGate(RMSNorm):
    """RMSNorm(x) w SiLU(gate): the order of Gated DeltaNet."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * F.silu(gate)


class GateThenNorm(RMSNorm):
    """RMSNorm(x SiLU(gate)) w: the order of Mamba-2."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * F.silu(gate))


def rms_norm(x: Tensor, weight: Tensor, eps: float, num_groups: int = 1) -> Tensor:
    """Divide (..., width) by the root of its mean square, group by group, and scale by weight.

    >>> rms_norm(torch.tensor([3.0, -3.0]), torch.tensor([1.0, 2.0]), eps=0.0)
    tensor([ 1., -2.])

    With autograd it is eight passes each way; here a tile stays in the cache for all of them.
    """
    return _RMSNorm.apply(x, weight, eps, num_groups)[0]


def _rms_norm_over_ranks(
    x: Tensor, weight: Tensor, eps: float, num_groups: int, ranks: HeadRanks
) -> Tensor:
    """Norm the own part of a group that several ranks share, each of one group."""
    wide, group = x.to(torch.promote_types(x.dtype, torch.float32)), ranks.rank * num_groups
    group //= ranks.size
    squares = wide.square().sum(-1, keepdim=True)
    total = ranks.total(F.pad(squares, (group, num_groups - 1 - group)))[..., group, None]
    mean = total * (num_groups / (x.shape[-1] * ranks.size))
    return (wide * (mean + eps).rsqrt() * weight.to(wide.dtype)).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float, num_groups: int) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, num_groups, x.shape[-1] // num_groups)
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = x.new_empty(len(rows), num_groups, 1, dtype=wide)
        out = torch.empty_like(rows)
        gain = weight.to(wide).view(num_groups, -1)
        for tile in _norm_tiles(rows):
            some = rows[tile].to(wide)
            scale[tile] = ((some * some).mean(-1, keepdim=True) + eps).rsqrt_()
            out[tile] = (some * scale[tile]).mul_(gain)
        return out.view(x.shape), scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*inputs[:2], output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        num_groups, wide = scale.shape[1], scale.dtype
        shape = (-1, num_groups, x.shape[-1] // num_groups)
        rows, grads = x.reshape(shape), grad.reshape(shape)
        gain = weight.to(wide).view(num_groups, -1)
        grad_rows, grad_gain = torch.empty_like(rows), torch.zeros_like(gain)
        for tile in _norm_tiles(rows):
            unit = rows[tile].to(wide) * scale[tile]
            pull = grads[tile].to(wide)
            grad_gain += (pull * unit).sum(0)
            pull = pull * gain
            pull -= unit.mul_((pull * unit).mean(-1, keepdim=True))
            grad_rows[tile] = pull.mul_(scale[tile])
        return grad_rows.view(x.shape), grad_gain.view(-1).to(weight.dtype), None, None


def _norm_tiles(rows: Tensor) -> Iterator[slice]:
    if torch.compiler.is_compiling() or rows.device.type != "cpu":
        yield slice(None)
        return
    size = max(1, TILE_ELEMENTS // max(1, rows[:1].numel()))
    for start in range(0, len(rows), size):
        yield slice(start, start + size)


def rotate(x: Tensor, position: Tensor, base: float = 10000.0) -> Tensor:
    """Turn pairs of coordinates by angles that grow with the position (rotary positions).

    >>> x = torch.randn(1, 2, 1, 4)
    >>> torch.equal(rotate(x, torch.tensor([[0, 7]]))[:, 0], x[:, 0])
    True

    x (B, T, H, K) with K even, position (B, T): coordinates i and i + K/2 make a pair.
    """
    half = x.shape[-1] // 2
    if 2 * half != x.shape[-1]:
        raise ValueError(f"rotary positions need an even width, got {x.shape[-1]}")
    kind = torch.promote_types(x.dtype, torch.float32)
    rate = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (position.unsqueeze(-1) * rate).unsqueeze(-2)
    cos, sin = angle.cos().to(kind), angle.sin().to(kind)
    first, second = x.to(kind).split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


@torch.no_grad()
def init_step_bias_(bias: Tensor) -> Tensor:
    """Draw steps log-uniformly from [0.001, 0.1] and store what softplus turns into them."""
    draw = torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1))
    step = draw.exp_().clamp_(min=1e-4)
    return keep_from_decay_(bias.copy_(step + torch.log(-torch.expm1(-step))))


@torch.no_grad()
def init_decay_rate_(log_rate: Tensor, low: float = 1.0, high: float = 16.0) -> Tensor:
    """Draw rates A uniformly from [low, high] and store ln A."""
    return keep_from_decay_(log_rate.uniform_(low, high).clamp_(min=1e-4).log_())


def keep_from_decay_(parameter: Tensor) -> Tensor:
    """Mark a parameter that weight decay must leave alone."""
    parameter._no_weight_decay = True  # type: ignore[attr-defined]
    return parameter


def step_and_log_decay(raw: Tensor, step_bias: Tensor, log_rate: Tensor) -> tuple[Tensor, Tensor]:
    """Turn a projection into step sizes and log-decays: softplus(raw + bias), -exp(ln A) step.

    >>> step, log_decay = step_and_log_decay(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    >>> step, log_decay
    (tensor([0.6931]), tensor([-0.6931]))
    """
    kind = torch.promote_types(raw.dtype, torch.float32)
    step = F.softplus(raw.to(kind) + step_bias.to(kind))
    return step, -log_rate.to(kind).exp() * step


def head_sizes(
    hidden_size: int, num_heads: int, num_kv_heads: int | None, head_dim: int | None
) -> tuple[int, int]:
    """Return the number of key heads and the width of a head, from what is given of them.

    >>> head_sizes(64, 4, None, None), head_sizes(64, 3, 1, 16)
    ((4, 16), (1, 16))
    """
    if num_heads < 1 or (head_dim is None and hidden_size % num_heads):
        raise ValueError(f"a width of {hidden_size} makes no {num_heads} heads; give head_dim")
    key_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % key_heads:
        raise ValueError(f"{num_heads} query heads are no multiple of {key_heads} key heads")
    return key_heads, hidden_size // num_heads if head_dim is None else head_dim


def expanded(head_dim: int, expand_v: float) -> int:
    """Return the width of a value, `expand_v` times that of a key."""
    value_dim = round(head_dim * expand_v)
    if value_dim < 1 or value_dim != head_dim * expand_v:
        raise ValueError(f"expand_v = {expand_v} makes no whole width of head_dim {head_dim}")
    return value_dim


def describe_mask(mask: SMatMask, horizon: int | None) -> str:
    """Say in a `repr` what a layer's mask is."""
    return f"vc_dim={mask.vc_dim}, horizon={horizon}, boundary={mask.boundary.describe()}"
