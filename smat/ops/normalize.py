"""Root-mean-square norm, forward and backward, tile by tile.

Written with autograd it is eight passes each way over arrays as large as the input; a tile stays
in the cache while all of them work on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_ELEMENTS = 1 << 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, num_groups: int = 1) -> Tensor:
    """Divide (..., width) by the root of its mean square, group by group, and scale by weight.

    >>> rms_norm(torch.tensor([3.0, -3.0]), torch.tensor([1.0, 2.0]), eps=0.0)
    tensor([ 1., -2.])
    """
    return _RMSNorm.apply(x, weight, eps, num_groups)[0]  # type: ignore[no-untyped-call]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float, num_groups: int) -> tuple[Tensor, Tensor]:
        rows = x.reshape(-1, num_groups, x.shape[-1] // num_groups)
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = x.new_empty(len(rows), num_groups, 1, dtype=wide)
        out = torch.empty_like(rows)
        gain = weight.to(wide).view(num_groups, -1)
        for tile in _tiles(rows):
            some = rows[tile].to(wide)
            scale[tile] = (_mean_product(some, some) + eps).rsqrt_()
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
        for tile in _tiles(rows):
            unit = rows[tile].to(wide) * scale[tile]
            pull = grads[tile].to(wide)
            grad_gain += (pull * unit).sum(0)
            pull = pull * gain
            pull -= unit.mul_(_mean_product(pull, unit))
            grad_rows[tile] = pull.mul_(scale[tile])
        return grad_rows.view(x.shape), grad_gain.view(-1).to(weight.dtype), None, None


def _mean_product(x: Tensor, y: Tensor) -> Tensor:
    """Average x y over the last dimension, keeping it."""
    return (x * y).mean(-1, keepdim=True)


def _tiles(rows: Tensor) -> Iterator[slice]:
    if torch.compiler.is_compiling() or rows.device.type != "cpu":
        yield slice(None)
        return
    size = max(1, TILE_ELEMENTS // max(1, rows[:1].numel()))
    for start in range(0, len(rows), size):
        yield slice(start, start + size)
