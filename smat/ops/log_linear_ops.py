"""Both forms of log-linear attention as one operator that differentiates and compiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smat.ops.log_linear_decay import DecayTree
from smat.ops.log_linear_delta import DeltaTree
from smat.ops.wy import check_gates, full_precision


@torch.library.custom_op("smat::log_linear", mutates_args=())
@full_precision
def log_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    scale: float,
    chunk_size: int,
) -> Tensor:
    """Attend with a weight per level; `beta` turns scalar decay into delta-rule transitions."""
    check_gates(log_decay)
    return _tree(q, k, v, level_weights, log_decay, beta, scale, chunk_size).forward()


@torch.library.custom_op("smat::log_linear_backward", mutates_args=())
@full_precision
def log_linear_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    scale: float,
    chunk_size: int,
) -> list[Tensor]:
    """Build the tree again and return the gradients of all inputs, that of `beta` last if given."""
    return _tree(q, k, v, level_weights, log_decay, beta, scale, chunk_size).backward(grad)


def _tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    scale: float,
    chunk_size: int,
) -> DecayTree | DeltaTree:
    if beta is None:
        return DecayTree(q, k, v, level_weights, log_decay, scale, chunk_size)
    return DeltaTree(q, k, v, level_weights, log_decay, beta, scale, chunk_size)


@log_linear.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    scale: float,
    chunk_size: int,
) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@log_linear_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    scale: float,
    chunk_size: int,
) -> list[Tensor]:
    given = [x for x in (q, k, v, level_weights, log_decay, beta) if x is not None]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.settings = inputs[6:]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = log_linear_backward(grad, *ctx.saved_tensors, *ctx.settings)
    return *grads, *[None] * (8 - len(grads))


log_linear.register_autograd(_backward, setup_context=_remember)
