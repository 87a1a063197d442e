"""Which types a query reads, and with what weights (appendix "Query routing and causality").

Every selector looks at one token at a time, (..., hidden_size), and returns (..., H, k) types and
weights: it serves prefill and decoding alike, and is causal because its input is. Costs are
multiply-adds for T tokens, a head.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from smat.distributed import HeadRanks
from smat.geometry import Geometry
from smat.geometry.field import next_prime
from smat.masks import SMatMask, type_through_cell
from smat.ops.smat.routing import Routing


class Selector(nn.Module):
    """What a routing asks of every selector; one that learns nothing needs no more."""

    needs_own_profile = False  # whether what is read depends on the query's own point
    reads_request = False  # whether it does on the points of the tokens that the query asks for
    reads_points = False  # whether types are points, to be read under `point_mask`

    def cut_heads(self, ranks: HeadRanks) -> None:
        """Keep what belongs to this rank's heads."""


class ScoringSelector(Selector):
    """A linear map that scores something for each head, and how many reads come of it."""

    def __init__(
        self, hidden_size: int, num_heads: int, geometry: Geometry, num_reads: int = 4
    ) -> None:
        super().__init__()
        if num_reads < 1:
            raise ValueError(f"num_reads must be 1 or more, got {num_reads}")
        self.num_heads, self.geometry = num_heads, geometry
        self.num_reads = min(num_reads, geometry.num_types)
        self.num_directions = max(1, geometry.num_directions)
        self.num_offsets = geometry.num_types // self.num_directions
        self.scorer = nn.Linear(hidden_size, num_heads * self.num_scores())

    @abstractmethod
    def num_scores(self) -> int:
        """Count what is scored for each head."""

    def cut_heads(self, ranks: HeadRanks) -> None:
        ranks.cut(self.scorer, (self.scorer.out_features, self.num_heads))
        self.num_heads = ranks.own(self.num_heads)

    def score(self, hidden: Tensor) -> Tensor:
        """Score what there is to choose from, (..., hidden_size) -> (..., H, num_scores)."""
        scores = self.scorer(hidden).unflatten(-1, (self.num_heads, -1))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))


class TopTypes(ScoringSelector):
    """Read the highest-scored of all types, weighted by the softmax of their scores.

    >>> selector = TopTypes(hidden_size=8, num_heads=2, geometry=Geometry(3, 5))
    >>> reads = selector(torch.randn(4, 10, 8))
    >>> reads.query_type.shape, torch.allclose(reads.read_weight.sum(-1), torch.ones(4, 10, 2))
    (torch.Size([4, 10, 2, 4]), True)

    Gradients pass through the chosen scores only, as ordinary derivatives of the softmax. A single
    read has no other to be weighed against: its gradient is straight through, see `best_of`.
    Cost: T B hidden_size, B = `geometry.num_types` ~ T^(1 - 1/d); backward T k hidden_size.
    Paper: l = the scores, Top4 = `num_reads` of them, R = `read_weight`.
    """

    def num_scores(self) -> int:
        return self.geometry.num_types

    def forward(self, hidden: Tensor, profile: Tensor | None = None) -> Routing:
        if self.num_reads == 1:
            query_type, weight = best_of(self.score(hidden))
            return Routing(query_type=query_type, read_weight=weight)
        with torch.no_grad():
            scores = self.score(hidden)
            query_type = scores.topk(self.num_reads, dim=-1).indices
        score = chosen_scores(scores, query_type, hidden, self.scorer.weight, self.scorer.bias)
        return Routing(query_type=query_type, read_weight=score.softmax(-1))


class FactoredTopTypes(ScoringSelector):
    """Read the highest-scored types where a score is that of the direction plus the offset's.

    >>> selector = FactoredTopTypes(hidden_size=8, num_heads=2, geometry=Geometry(3, 5))
    >>> reads = selector(torch.randn(4, 10, 8))
    >>> reads.query_type.shape, selector.num_scores()  # 11 scores instead of 30
    (torch.Size([4, 10, 2, 4]), 11)

    The selection is exact: the best k sums have their direction and their offset among the best k.
    Cost: T (A + q) hidden_size + T k^2, A directions of q offsets.
    """

    def num_scores(self) -> int:
        return self.num_directions + self.num_offsets

    def forward(self, hidden: Tensor, profile: Tensor | None = None) -> Routing:
        scores = self.score(hidden).split([self.num_directions, self.num_offsets], -1)
        if self.num_reads == 1:
            (direction, one), (offset, other) = map(best_of, scores)
            query_type = direction * self.num_offsets + offset
            return Routing(query_type=query_type, read_weight=one * other)
        best = [each.topk(min(self.num_reads, each.shape[-1]), dim=-1) for each in scores]
        (direction_score, direction), (offset_score, offset) = best
        sums = (direction_score.unsqueeze(-1) + offset_score.unsqueeze(-2)).flatten(-2)
        types = (direction.unsqueeze(-1) * self.num_offsets + offset.unsqueeze(-2)).flatten(-2)
        chosen, place = sums.topk(self.num_reads, dim=-1)
        return Routing(query_type=types.gather(-1, place), read_weight=chosen.softmax(-1))


class OwnHyperplane(ScoringSelector):
    """Read one hyperplane through the query's own hash point: type H_(a, a . u).

    >>> selector = OwnHyperplane(hidden_size=8, num_heads=2, geometry=Geometry(3, 5))
    >>> hidden, own_point = torch.randn(4, 10, 8), torch.randint(25, (4, 10, 2))
    >>> reads = selector(hidden, own_point)
    >>> reads.query_type.shape, bool((reads.read_weight == 1).all())
    (torch.Size([4, 10, 2, 1]), True)

    The direction is the best of A learned scores, see `best_of`. Cost: T A hidden_size.
    """

    needs_own_profile = True

    def num_scores(self) -> int:
        return self.num_directions

    def forward(self, hidden: Tensor, profile: Tensor) -> Routing:
        direction, weight = best_of(self.score(hidden))
        query_type = type_through_cell(self.geometry, direction.squeeze(-1), profile)
        return Routing(query_type=query_type.unsqueeze(-1), read_weight=weight)


class OwnCell(Selector):
    """Read the query's own hash cell and nothing else: bucketing by a learned hash.

    >>> reads = OwnCell()(torch.randn(4, 10, 8), torch.randint(25, (4, 10, 2)))
    >>> reads.query_type.shape
    torch.Size([4, 10, 2, 1])

    A cell is no hyperplane from d = 3 on: such reads go with `point_mask(mask)`, whose types are
    points. Cost: none, and there is nothing to learn.
    """

    needs_own_profile = True
    reads_points = True

    def __init__(self, *sizes: object, **reads: object) -> None:
        super().__init__()

    def forward(self, hidden: Tensor, profile: Tensor) -> Routing:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight = hidden.new_ones(*profile.shape, 1, dtype=wide)
        return Routing(query_type=profile.unsqueeze(-1), read_weight=weight)


def point_mask(mask: SMatMask) -> SMatMask:
    """Return the mask over the same cells whose types are single cells, with the same boundary.

    >>> point_mask(SMatMask(1024, vc_dim=3)).describe()  # 121 of its 127 cells are in use
    'SMatMask: T = 1024, d = 2, q = 127, n = 512, c = 64, boundary = rebuilt()'

    On a line the hyperplanes are the points, so d = 2 with a prime of at least P points serves.
    """
    cells = {"vc_dim": 2, "field_size": next_prime(mask.geometry.num_profiles)}
    return SMatMask.from_dict({**mask.to_dict(), **cells})


def best_of(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the best of scores (..., B), and give it the weight 1 that can be learned from.

    >>> chosen, weight = best_of(torch.tensor([0.0, 2.0, 1.0], requires_grad=True))
    >>> chosen, weight
    (tensor([1]), tensor([1.], grad_fn=<AddBackward0>))

    The weight is 1 + p - sg(p), p the softmax probability of the chosen one: the gradient of a
    larger read passes on to all B scores, a biased straight-through estimate.
    """
    probability, chosen = scores.softmax(-1).max(-1, keepdim=True)
    return chosen, 1 + (probability - probability.detach())  # exactly 1


def chosen_scores(
    scores: Tensor, chosen: Tensor, x: Tensor, weight: Tensor, bias: Tensor
) -> Tensor:
    """Take the chosen ones of scores (..., H, B), and let x, weight and bias have the gradient.

    >>> x, weight, bias = torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.zeros(2)
    >>> scores, chosen = (x @ weight.T).unsqueeze(1), torch.tensor([[[1]], [[0]]])
    >>> chosen_scores(scores, chosen, x, weight.requires_grad_(), bias).flatten()
    tensor([3., 2.], grad_fn=<ViewBackward0>)

    The scores are those of a linear map, x (..., width), weight (H B, width), bias (H B); `chosen`
    (..., H, k) names k of B. The dense adjoint would cost T B products of the width for gradients
    that are almost all zero; sums over the chosen ones cost T k.
    """
    return _ChosenScores.apply(x, weight, bias, scores, chosen)


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
        grad_x, grad_weight = grad_x.view(x.shape).to(x.dtype), grad_weight.to(weight.dtype)
        return grad_x, grad_weight, grad_bias.to(ctx.bias_dtype), None, None
