"""Project a normalised sum of embeddings without making it: table by table.

Let x_t = tokens[id_t] + positions[t] + payload_t P. With s_t = (mean of x_t^2 + eps)^(-1/2) and the
norm's weight g,

    W (g s_t x_t) = s_t (W g tokens[id_t] + W g positions[t] + payload_t (P g W)),

so tables of a few hundred rows are projected instead of every token of every example, and |x_t|^2
is a sum of products of table rows. What is left for each token is a sum of three rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class EmbeddingSum(NamedTuple):
    """x = tokens[ids] + positions + payload P, (B, T, width).

    >>> ids, payload = torch.tensor([[0, 2, 1]]), torch.tensor([[[0.0], [1.0], [0.0]]])
    >>> x = EmbeddingSum(ids, torch.eye(3), torch.zeros(3, 3), payload, torch.ones(1, 3))
    >>> x.at(torch.tensor([1, 2]))
    tensor([[[1., 1., 2.],
             [0., 1., 0.]]])
    """

    ids: Tensor  # (B, T)
    tokens: Tensor  # (V, width)
    positions: Tensor  # (T, width)
    payload: Tensor  # (B, T, m)
    payload_table: Tensor  # (m, width)

    def at(self, index: Tensor) -> Tensor:
        """Make x at some places (R, ...), (B, R, ..., width)."""
        embedded = F.embedding(self.ids[:, index], self.tokens) + self.positions[index]
        return embedded + self.payload[:, index] @ self.payload_table

    def project_normed(self, gain: Tensor, eps: float, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return RMSNorm(x) W^T for every W (n, width): (B, T, n) each."""
        scale = (self._mean_square() + eps).rsqrt()
        tables = (self.tokens * gain, self.positions * gain, self.payload_table * gain)
        fixed = (self.ids, self.payload, scale)
        projected = ((table @ weight.t() for table in tables) for weight in weights)
        return tuple(_SumRows.apply(*fixed, *each) for each in projected)  # type: ignore[no-untyped-call]

    def _mean_square(self) -> Tensor:
        """Average x^2 over the width, (B, T)."""
        tokens, positions, extra = self.tokens, self.positions, self.payload_table
        total = F.embedding(self.ids, tokens.square().sum(-1, keepdim=True)).squeeze(-1)
        total = total + positions.square().sum(-1)
        total = total + 2 * (tokens @ positions.t()).gather(0, self.ids)
        beside = F.embedding(self.ids, tokens @ extra.t()) + positions @ extra.t()
        with_payload = 2 * beside + self.payload @ (extra @ extra.t())
        total = total + (self.payload * with_payload).sum(-1)
        return total.clamp(min=0) / tokens.shape[-1]


class _SumRows(torch.autograd.Function):
    """y_t = s_t (tokens[id_t] + positions[t] + payload_t table), tables being projected ones."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        payload: Tensor,
        scale: Tensor,
        tokens: Tensor,
        positions: Tensor,
        extra: Tensor,
    ) -> Tensor:
        out = tokens.new_empty(*ids.shape, tokens.shape[-1])
        for row, target in enumerate(out):  # an example stays in cache
            torch.index_select(tokens, 0, ids[row], out=target)
            target += positions
            target.addmm_(payload[row], extra).mul_(scale[row, :, None])
        ctx.save_for_backward(ids, payload, scale, out)
        ctx.num_tokens = len(tokens)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, payload, scale, out = ctx.saved_tensors
        batch, length = ids.shape
        flat, weight = grad.flatten(0, 1), scale.flatten()
        every = torch.arange(batch * length, device=ids.device).view(batch, length)
        sorted_ids, order = ids.flatten().sort(stable=True)
        starts = torch.searchsorted(sorted_ids, torch.arange(ctx.num_tokens, device=ids.device))
        grad_tokens = _weighted_sums(flat, order, starts, weight)
        grad_positions = _weighted_sums(flat, every.t().flatten(), every[0] * batch, weight)
        grad_extra = (payload.flatten(0, 1) * weight[:, None]).t() @ flat
        grad_scale = torch.empty_like(scale)
        for row in range(batch):
            grad_scale[row] = (grad[row] * out[row]).sum(-1)
        return None, None, grad_scale / scale, grad_tokens, grad_positions, grad_extra


def _weighted_sums(rows: Tensor, order: Tensor, starts: Tensor, weight: Tensor) -> Tensor:
    """Add up runs of weighted rows: run i is order[starts[i]] .. order[starts[i + 1] - 1]."""
    return F.embedding_bag(
        order, rows.contiguous(), starts, mode="sum", per_sample_weights=weight[order]
    )
