"""Several projections of one input, whose gradients meet in one array."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def project(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return x weight^T for every weight, (..., width) -> (..., n) each.

    >>> x, narrow, wide = torch.randn(2, 3, 4), torch.randn(1, 4), torch.randn(8, 4)
    >>> [tuple(y.shape) for y in project(x, narrow, wide)]
    [(2, 3, 1), (2, 3, 8)]

    One product with all weights leaves outputs that are strided, and whose gradients have to be
    laid side by side again; separate products make one gradient of x each. Here the outputs are
    apart and the gradients of x are added by the products themselves.
    """
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, weights = x.to(dtype), tuple(weight.to(dtype) for weight in weights)
    return _Project.apply(x, *weights)  # type: ignore[no-untyped-call]


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        return tuple(x @ weight.t() for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, *weights = ctx.saved_tensors
        rows = x.flatten(0, -2)
        flat = [grad.flatten(0, -2) for grad in grads]
        grad_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            grad_x.addmm_(grad, weight)
        return grad_x.view(x.shape), *(grad.t() @ rows for grad in flat)
