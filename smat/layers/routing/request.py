"""Reads of a request: the hyperplane through the points of tokens that a query asks for.

Both selectors are given the points of the last tokens up to a query, (..., H, W), the own first:
one takes all of them, by rule, the other learns which of them are asked for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.distributed import HeadRanks
from smat.geometry import Geometry
from smat.geometry.field import offsets
from smat.layers.routing.selectors import Selector
from smat.masks import agreeing_direction, type_through_cell
from smat.ops.smat.routing import Routing

MOST_TOKENS = 8  # that are scored: their sets are told apart by the bits of a number
START_STD = 0.02  # of the scores that they begin with, about 1
BLOCK = 1 << 20  # numbers at a time


class RequestHyperplane(Selector):
    """Read the one hyperplane through the points of all tokens that a query asks for.

    >>> reads = RequestHyperplane(8, 2, Geometry(3, 5))(
    ...     torch.randn(1, 1, 8), torch.tensor([[[[7, 11], [7, 12]]]])
    ... )
    >>> reads.query_type  # lines of both points, in each head
    tensor([[[[ 8],
              [27]]]])

    The rule of multi-key recall, for a hash that is learned: H_(a, a . u) through the query's own
    point u, with the first direction a on which all points agree, direction 0 if there is none. Up
    to d - 1 points always lie on one hyperplane; more do only by chance. There is nothing to learn,
    and points (B, T, H, k), the own first, are given. Cost: T k A / 8 bytes, A directions.
    """

    reads_request = True

    def __init__(
        self, hidden_size: int, num_heads: int, geometry: Geometry, **reads: int | float
    ) -> None:
        super().__init__()
        self.geometry = geometry

    def forward(self, hidden: Tensor, points: Tensor) -> Routing:
        query_type = _type_through(points, self.geometry.vc_dim, self.geometry.field_size)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        weight = hidden.new_ones(query_type.shape, dtype=wide)
        return Routing(query_type=query_type, read_weight=weight)


class LearnedRequest(Selector):
    """Learn which of the last tokens a query asks for, and read one hyperplane through these.

    >>> selector = LearnedRequest(8, 2, Geometry(3, 5), request_tokens=3)
    >>> reads = selector(torch.randn(1, 4, 8), torch.randint(25, (1, 4, 2, 3)))
    >>> reads.read_weight[0, 0, 0]  # one read, and three others that it is compared with
    tensor([1., 0., 0., 0.], grad_fn=<SelectBackward0>)

    A linear map of the query gives each of the W last tokens a score l, the same in all heads: a
    request is not shared out among them. Of the sets of tokens whose points some hyperplane holds,
    and it holds no other of the W, the one with the largest sum of l is read, through the first
    such hyperplane. Its gradient compares it with the next best sets, `num_reads` in all: forward
    one counts, backward the softmax of their sums, a biased straight-through estimate. Without
    gradients the others are not read. Cost: T W hidden_size, and T W (W A + 2^W) a head.
    """

    reads_request = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        geometry: Geometry,
        num_reads: int = 4,
        request_tokens: int = 4,
        noise: float = 0.0,
    ) -> None:
        super().__init__()
        if num_reads < 1:
            raise ValueError(f"num_reads must be 1 or more, got {num_reads}")
        if not 1 <= request_tokens <= MOST_TOKENS:
            between = f"between 1 and {MOST_TOKENS}"
            raise ValueError(
                f"request_tokens must lie {between} to be scored, got {request_tokens}"
            )
        self.geometry, self.noise = geometry, noise
        self.num_reads = min(num_reads, 2**request_tokens - 1)
        self.scorer = nn.Linear(hidden_size, request_tokens)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scorer.weight)
        # At first all tokens are asked for, in an order that is drawn.
        nn.init.normal_(self.scorer.bias, mean=1.0, std=START_STD)

    def cut_heads(self, ranks: HeadRanks) -> None:
        ranks.share(self.scorer)

    def forward(self, hidden: Tensor, points: Tensor) -> Routing:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        asked = self.scorer(hidden).to(wide)
        if self.training and self.noise:
            asked = asked + self.noise * torch.randn_like(asked)
        types = _types_through_sets(points, self.geometry.vc_dim, self.geometry.field_size)
        token = torch.arange(asked.shape[-1], device=points.device)
        sets = torch.arange(types.shape[-1], device=points.device)
        held = sets.unsqueeze(-1) >> token & 1  # (2^W, W)
        score = (asked.unsqueeze(-2) * held).sum(-1).unsqueeze(-2)
        score = score.masked_fill(types < 0, -torch.inf)  # (..., H, 2^W)
        best = score.detach().sort(dim=-1, descending=True, stable=True).indices
        is_learning = torch.is_grad_enabled()
        best = best[..., : self.num_reads if is_learning else 1]
        query_type = types.gather(-1, best).clamp(min=0)  # with a share of 0 where there is no set
        weight = F.one_hot(best.new_zeros(best.shape[:-1]), best.shape[-1]).to(wide)
        if is_learning:
            share = score.gather(-1, best).softmax(-1)
            weight = weight + (share - share.detach())
        return Routing(query_type=query_type, read_weight=weight)


# Operators of their own, for compilers: the tables of a geometry are cached.
@torch.library.custom_op("smat::type_through", mutates_args=())
def _type_through(points: Tensor, vc_dim: int, field_size: int) -> Tensor:
    """Name the hyperplane through points (..., k), or through the first: (..., 1)."""
    geometry = Geometry(vc_dim, field_size)
    direction, _ = agreeing_direction(geometry, points)
    return type_through_cell(geometry, direction, points[..., 0]).unsqueeze(-1)


@_type_through.register_fake
def _(points: Tensor, vc_dim: int, field_size: int) -> Tensor:
    return points.new_empty(*points.shape[:-1], 1)


@torch.library.custom_op("smat::types_through_sets", mutates_args=())
def _types_through_sets(points: Tensor, vc_dim: int, field_size: int) -> Tensor:
    """Name the first hyperplane that holds each set of points (..., W) and no other: (..., 2^W).

    Point i is in set s if bit i of s is 1; a set that no hyperplane holds alone has -1.
    """
    geometry, width = Geometry(vc_dim, field_size), points.shape[-1]
    bit = 1 << torch.arange(width, device=points.device)
    found = points.new_full((*points.shape[:-1], 1 << width), geometry.num_types)
    if geometry.ambient_dim == 0:
        found[..., -1] = 0  # all points are one
    else:
        offset_of = offsets(field_size, geometry.ambient_dim, points.device).T  # (P, A)
        first_type = field_size * torch.arange(geometry.num_directions, device=points.device)
        rows = max(1, BLOCK // (width * geometry.num_directions))
        for part, into in zip(
            points.flatten(0, -2).split(rows), found.flatten(0, -2).split(rows), strict=True
        ):
            offset = offset_of[part]  # (rows, W, A)
            for own in offset.unbind(1):
                code = ((offset == own.unsqueeze(1)) * bit.unsqueeze(-1)).sum(1)
                into.scatter_reduce_(-1, code, first_type + own, "amin")
    return found.masked_fill(found == geometry.num_types, -1)


@_types_through_sets.register_fake
def _(points: Tensor, vc_dim: int, field_size: int) -> Tensor:
    return points.new_empty(*points.shape[:-1], 1 << points.shape[-1])
