"""Linear scores of many classes of which a few are wanted, with gradients through these alone.

Scoring all B classes of T tokens costs T B products of the width. Where only k are chosen, the
dense adjoint would cost twice as much again for gradients that are almost all zero; sums over the
chosen ones cost T k.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def chosen_scores(
    scores: Tensor, chosen: Tensor, x: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Take the chosen ones of scores (..., H, B), and let x, weight and bias have the gradient.

    >>> x, weight, bias = torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2)
    >>> scores, chosen = (x @ weight.T).unsqueeze(1), torch.tensor([[[1]], [[0]]])
    >>> chosen_scores(scores, chosen, x, weight.requires_grad_(), bias).flatten()
    tensor([3., 2.], grad_fn=<ViewBackward0>)

    The scores are those of a linear map, x (..., width), weight (H B, width), bias (H B); `chosen`
    (..., H, k) names k of B.
    """
    return _ChosenScores.apply(x, weight, bias, scores, chosen)  # type: ignore[no-untyped-call]


class _ChosenScores(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        return scores.gather(-1, chosen)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x, weight, bias, scores, chosen = inputs
        ctx.save_for_backward(x, weight, chosen)
        ctx.num_classes, ctx.bias_dtype = scores.shape[-1], bias.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, chosen = ctx.saved_tensors
        wide, heads = grad.dtype, torch.arange(chosen.shape[-2], device=chosen.device)
        row = (chosen + ctx.num_classes * heads.unsqueeze(-1)).flatten(-2).flatten(0, -2)
        per_token, pull = row.shape[1], grad.reshape(row.shape)
        grad_x = F.embedding_bag(row, weight.to(wide), mode="sum", per_sample_weights=pull)
        # A row of the weight meets the tokens that chose it: the same sum, sorted by row.
        order = row.flatten().argsort()
        count = torch.bincount(row.flatten(), minlength=len(weight))
        grad_weight = F.embedding_bag(
            order // per_token, x.flatten(0, -2).to(wide), count.cumsum(0) - count, mode="sum",
            per_sample_weights=pull.flatten()[order],
        )  # fmt: skip
        grad_bias = pull.new_zeros(len(weight)).index_add_(0, row.flatten(), pull.flatten())
        return (
            grad_x.view(x.shape).to(x.dtype),
            grad_weight.to(weight.dtype),
            grad_bias.to(ctx.bias_dtype),
            None,
            None,
        )
