"""Cross-entropy of a large vocabulary, a few tokens at a time: never T x vocabulary logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_LOGITS = 1 << 24  # that are held at a time: 64 MB
IGNORED = -100


def summed_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Add up -log softmax(weight h)[label] over all tokens whose label is not -100.

    >>> hidden, weight = torch.eye(2), torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    >>> summed_cross_entropy(hidden, weight, torch.tensor([0, IGNORED]))
    tensor(0.2395)

    hidden (..., width), weight (vocabulary, width), labels (...). The logits of a tile of tokens
    are made, summed up in fp32 or wider, and made again for the gradient.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    found = labels.reshape(-1) != IGNORED
    where = found.nonzero().flatten()
    if len(where) < len(flat):
        flat = flat[where]
    return _SummedCrossEntropy.apply(flat, weight, labels.reshape(-1)[where])


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total = hidden.new_zeros((), dtype=wide)
        log_sum = hidden.new_empty(len(hidden), dtype=wide)
        for tile in _tiles(hidden, weight):
            logits = _logits(hidden[tile], weight, wide)
            log_sum[tile] = logits.logsumexp(-1)
            total += log_sum[tile].sum() - logits.gather(1, labels[tile, None]).sum()
        ctx.save_for_backward(hidden, weight, labels, log_sum)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sum = ctx.saved_tensors
        wide = log_sum.dtype
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight, dtype=wide)
        for tile in _tiles(hidden, weight):
            pull = _logits(hidden[tile], weight, wide).sub_(log_sum[tile, None]).exp_()
            pull.scatter_add_(1, labels[tile, None], pull.new_full((len(pull), 1), -1))
            pull = pull.mul_(grad).to(hidden.dtype)
            grad_hidden[tile] = pull @ weight.to(hidden.dtype)
            if grad_weight is not None:
                grad_weight += pull.t() @ hidden[tile]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None


def _logits(hidden: Tensor, weight: Tensor, wide: torch.dtype) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return (hidden @ weight.to(hidden.dtype).t()).to(wide)


def _tiles(hidden: Tensor, weight: Tensor) -> Iterator[slice]:
    size = max(1, TILE_LOGITS // max(1, len(weight)))
    for start in range(0, len(hidden), size):
        yield slice(start, start + size)
