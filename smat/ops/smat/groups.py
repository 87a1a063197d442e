"""Tokens that share a table entry: pooled into it, or reading it (equation 6).

Distant keys are grouped by profile, queries by type. Two products are all that the long range
needs, and each is the other's adjoint; with tables (N, groups, a, b) of one state a group,

    pool   table[x] = sum over t in group x of left_t right_t'    (N, T, a), (N, T, b) -> table
    read   answer_t = left_t' table[x(t)]                         (N, T, a), table -> (N, T, b)

``read`` with transposed states gives the other gradients. Neither forms a state per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PADDED = 1.2  # slots of a run against its visits
SPARE_SLOTS = 256  # which cost no more than another run
MAX_SLOTS = 1 << 15  # of a run of several groups


class PeriodicGroups:
    """Token t belongs to group (first + t) mod num_groups: views, no sort, no gather.

    >>> groups = PeriodicGroups(num_groups=2, first=1)
    >>> groups.pool(torch.ones(1, 3, 1), torch.tensor([[[1.0], [2.0], [4.0]]])).flatten()
    tensor([2., 5.])
    """

    def __init__(self, num_groups: int, first: int) -> None:
        self.num_groups = num_groups
        self.first = first % num_groups

    def _turns(self, length: int) -> Iterator[tuple[slice, slice, int]]:
        """Cut tokens into whole turns and what stands before and after: tokens, groups, turns."""
        head = min(-self.first % self.num_groups, length)
        num_turns, tail = divmod(length - head, self.num_groups)
        if num_turns:
            yield slice(head, length - tail), slice(0, self.num_groups), num_turns
        if head:
            yield slice(0, head), slice(self.first, self.first + head), 1
        if tail:
            yield slice(length - tail, length), slice(0, tail), 1

    def pool(self, left: Tensor, right: Tensor, onto: Tensor | None = None) -> Tensor:
        """Sum left_t right_t' over each group; onto a table if one is given, in place."""
        table = onto
        for tokens, groups, num_turns in self._turns(left.shape[1]):
            one, other = (_by_group(x[:, tokens], num_turns) for x in (left, right))
            if table is None and num_turns > 1:
                table = torch.matmul(one.mT, other)
                continue
            if table is None:
                shape = (len(left), self.num_groups, left.shape[-1], right.shape[-1])
                table = left.new_zeros(shape)
            if num_turns > 1:
                table += torch.matmul(one.mT, other)
            else:
                table[:, groups].addcmul_(one.mT, other)
        assert table is not None
        return table

    def read(self, left: Tensor, table: Tensor) -> Tensor:
        """Contract each token's vector with its group's state."""
        answers = left.new_empty(*left.shape[:2], table.shape[-1])
        for tokens, groups, num_turns in self._turns(left.shape[1]):
            answer = torch.matmul(_by_group(left[:, tokens], num_turns), table[:, groups])
            answers[:, tokens].unflatten(1, (num_turns, -1)).copy_(answer.transpose(1, 2))
        return answers


def _by_group(x: Tensor, num_turns: int) -> Tensor:
    """(N, turns groups, f) -> (N, groups, turns, f)."""
    return x.unflatten(1, (num_turns, -1)).transpose(1, 2)


class Run(NamedTuple):
    """Groups side by side with equally many slots each; what no visit fills holds zeros."""

    groups: slice
    visits: slice
    slots: slice
    width: int


def cut_runs(sizes: list[int]) -> Iterator[Run]:
    """Cut groups of given sizes into runs, each as long as padding costs little.

    >>> [(run.groups.stop, run.width) for run in cut_runs([2000, 400, 390, 250, 0])]
    [(1, 2000), (4, 400), (5, 0)]
    """
    first = visits = slots = 0
    while first < len(sizes):
        width = total = sizes[first]
        last = first + 1
        while last < len(sizes):
            wider, more = max(width, sizes[last]), total + sizes[last]
            if wider * (last + 1 - first) > min(MAX_SLOTS, MAX_PADDED * more + SPARE_SLOTS):
                break
            width, total, last = wider, more, last + 1
        filled = slice(slots, slots + width * (last - first))
        yield Run(slice(first, last), slice(visits, visits + total), filled, width)
        first, visits, slots = last, visits + total, filled.stop


class SortedGroups:
    """Each token names its group, (N, T), or its k groups, (N, T, k), and perhaps their weights.

    >>> groups = SortedGroups(torch.tensor([[1, 0, 1]]), num_groups=2)
    >>> groups.pool(torch.ones(1, 3, 1), torch.tensor([[[1.0], [2.0], [4.0]]])).flatten()
    tensor([2., 5.])

    Visits are sorted by group. Neighbouring groups of about one size form a run, which is one
    batched product: there are few if groups stand in the order of their visits (`VisitOrder`).
    """

    def __init__(self, index: Tensor, num_groups: int, weight: Tensor | None = None) -> None:
        self.num_groups, self.shape = num_groups, index.shape
        self.num_reads = index.shape[2] if index.ndim == 3 else 1
        self.weight = None if weight is None else weight.reshape(-1, self.num_reads)
        row = torch.arange(len(index), device=index.device)
        group = (row[:, None] * num_groups + index.flatten(1)).flatten()  # among those of all rows
        count = torch.bincount(group, minlength=len(index) * num_groups)
        self.runs = list(cut_runs(count.tolist()))
        width = [run.width for run in self.runs for _ in range(run.groups.stop - run.groups.start)]
        spare = torch.tensor(width, device=index.device, dtype=torch.long) - count  # of every group
        order = group.argsort(stable=True)
        place = torch.arange(len(order), device=index.device)
        place += (spare.cumsum(0) - spare)[group[order]]
        self.slot = torch.empty_like(order).scatter_(0, order, place)
        self.token = order // self.num_reads  # of every visit, sorted by group
        self.visit_weight = None if self.weight is None else self.weight.flatten()[order]
        self.num_slots = self.runs[-1].slots.stop if self.runs else 0
        filled = order.new_zeros(self.num_slots).scatter_(0, place, 1)
        self.before = filled.cumsum(0) - filled  # the number of visits before each slot

    def _tiles(self, run: Run, x: Tensor, weighted: bool = False) -> Tensor:
        """Give the slots of a run the vectors of their tokens, out of (N T, f)."""
        weight = (
            self.visit_weight[run.visits] if weighted and self.visit_weight is not None else None
        )
        before = self.before[run.slots] - run.visits.start
        # A bag without a visit is a slot of zeros.
        of_slots = F.embedding_bag(
            self.token[run.visits], x, before, mode="sum", per_sample_weights=weight
        )
        return of_slots.view(run.groups.stop - run.groups.start, run.width, x.shape[-1])

    def pool(self, left: Tensor, right: Tensor, onto: Tensor | None = None) -> Tensor:
        """Sum left_t right_t' over each group, times the visit's weight; onto a table if given."""
        shape = (len(left), self.num_groups, left.shape[-1], right.shape[-1])
        table = left.new_empty(shape) if onto is None else onto
        states, left, right = table.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1)
        for run in self.runs:
            tiles = self._tiles(run, left, weighted=True).mT, self._tiles(run, right)
            if onto is None:
                torch.bmm(*tiles, out=states[run.groups])
            else:
                states[run.groups].baddbmm_(*tiles)
        return table

    def read(self, left: Tensor, table: Tensor) -> Tensor:
        """Contract each token's vector with the weighted sum of its groups' states."""
        return self._sum_visits(self._visit(left, table))

    def read_backward(self, left: Tensor, grad: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Find the gradients of a read: of its vectors (N, T, a), of its weights (N, T, k)."""
        pulled = self._visit(grad, table.mT)
        token = torch.arange(len(self.slot), device=left.device) // self.num_reads
        grad_weight = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            left.reshape(-1, left.shape[-1]), pulled, self.slot, token[:: self.num_reads], token, 0
        )
        return self._sum_visits(pulled), grad_weight.view(*self.shape[:2], self.num_reads)

    def _visit(self, x: Tensor, table: Tensor) -> Tensor:
        """Contract the vectors of tokens with the states of their groups: (slots, b)."""
        states, x = table.flatten(0, 1), x.flatten(0, 1)
        products = x.new_empty(self.num_slots, table.shape[-1])
        for run in self.runs:
            tiles = self._tiles(run, x)
            into = products[run.slots].view(*tiles.shape[:2], table.shape[-1])
            torch.bmm(tiles, states[run.groups], out=into)
        return products

    def _sum_visits(self, products: Tensor) -> Tensor:
        """Sum what the visits of each token found, times their weights: (N, T, b)."""
        slots = self.slot.view(-1, self.num_reads)
        total = F.embedding_bag(slots, products, mode="sum", per_sample_weights=self.weight)
        return total.view(*self.shape[:2], -1)


Groups = PeriodicGroups | SortedGroups


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor, groups: Groups) -> Tensor:
        ctx.groups = groups
        ctx.save_for_backward(left, right)
        return groups.pool(left, right)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right = ctx.saved_tensors
        return ctx.groups.read(right, grad.mT), ctx.groups.read(left, grad), None


def pool_groups(left: Tensor, right: Tensor, groups: Groups) -> Tensor:
    """Pool, for autograd; groups have no weights."""
    return _Pool.apply(left, right, groups)  # type: ignore[no-untyped-call]


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, left: Tensor, table: Tensor, weight: Tensor | None, groups: Groups
    ) -> Tensor:
        ctx.groups, ctx.is_weighted = groups, weight is not None
        ctx.save_for_backward(left, table)
        return groups.read(left, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (left, table), groups, grad_weight = ctx.saved_tensors, ctx.groups, None
        if ctx.is_weighted:
            grad_left, grad_weight = groups.read_backward(left, grad, table)
        else:
            grad_left = groups.read(grad, table.mT)
        return grad_left, groups.pool(left, grad), grad_weight, None


def read_groups(left: Tensor, table: Tensor, groups: Groups, weight: Tensor | None) -> Tensor:
    """Read, for autograd; the weights (N, T, k) are those of the groups."""
    return _Read.apply(left, table, weight, groups)  # type: ignore[no-untyped-call]


class VisitOrder(NamedTuple):
    """Tables hold the groups with most visits first, so that runs are few; N tables, each its own.

    >>> order = VisitOrder.of(torch.tensor([[2, 0, 2, 2, 0]]), num_groups=3)
    >>> order.place, order.group
    (tensor([[1, 2, 0]]), tensor([[2, 0, 1]]))
    >>> order.rename(torch.tensor([[2, 0, 1]]))
    tensor([[0, 1, 2]])
    """

    place: Tensor  # (N, groups), where every group stands
    group: Tensor  # (N, groups), which group stands at every place

    @classmethod
    def of(cls, index: Tensor, num_groups: int) -> VisitOrder:
        """Order the groups that tokens name, (N, ...)."""
        visits = index.flatten(1)
        count = visits.new_zeros(len(visits), num_groups)
        count.scatter_add_(1, visits, torch.ones_like(visits))
        group = count.argsort(dim=1, descending=True, stable=True)
        return cls(group.argsort(dim=1), group)

    def rename(self, index: Tensor) -> Tensor:
        """Name groups (N, ...) by their places."""
        return self.place.gather(1, index.flatten(1)).view(index.shape)
