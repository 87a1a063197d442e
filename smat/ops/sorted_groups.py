"""Groups that tokens name themselves: visits sorted by group, products of padded tiles.

A token may visit several groups, each with a weight of its own: the k types that a query reads. The
visits of a group stand in slots side by side. Neighbouring groups of about one size form a run:
each has as many slots as the largest of them, so that a run is one batched product, and states are
used where they stand. A slot that no visit fills holds zeros.

Runs end where padding would cost more than one more product. So there are few of them if groups
are in the order of their sizes, and in any order products cost about what dense ones cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.ops.workspace import scratch

MAX_PADDED = 1.2  # slots of a run against its visits
SPARE_SLOTS = 256  # which cost no more than another run
BATCH_SLOTS = 1 << 15  # whose vectors are taken together


class Run(NamedTuple):
    """Groups that stand side by side, with equally many slots each."""

    groups: slice
    visits: slice
    slots: slice
    width: int


class Batch(NamedTuple):
    """Runs whose vectors are taken together."""

    runs: list[Run]
    slots: slice
    token: Tensor  # of every visit, sorted by group
    weight: Tensor | None  # of every visit
    before: Tensor  # the number of visits before each slot

    def take(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """Give the slots their vectors, out of (tokens, f), times the weights of their visits."""
        return F.embedding_bag(self.token, x, self.before, mode="sum", per_sample_weights=weight)

    def tiles(self, run: Run, of_slots: Tensor) -> Tensor:
        """See what the batch's slots hold as tiles of the groups of a run, (groups, width, f)."""
        first = self.slots.start
        mine = of_slots[run.slots.start - first : run.slots.stop - first]
        return mine.view(run.groups.stop - run.groups.start, run.width, of_slots.shape[-1])


class SortedGroups:
    """Each token names its group, ``index`` (N, T), or its k groups, (N, T, k), and their weights.

    >>> groups = SortedGroups(torch.tensor([[1, 0, 1]]), num_groups=2)
    >>> groups.outer_sum(torch.ones(1, 3, 1), torch.tensor([[[1.0], [2.0], [4.0]]])).flatten()
    tensor([2., 5.])
    """

    def __init__(self, index: Tensor, num_groups: int, weight: Tensor | None = None) -> None:
        self.num_groups, self.shape, self.weight = num_groups, index.shape, weight
        self.num_reads = index[0, :1].numel() or 1
        row = torch.arange(len(index), device=index.device)
        group = (row[:, None] * num_groups + index.flatten(1)).flatten()  # among those of all rows
        count = torch.bincount(group, minlength=len(index) * num_groups)
        runs = list(cut_runs(count.tolist()))
        self.num_slots = runs[-1].slots.stop if runs else 0
        width = torch.tensor([run.width for run in runs], device=index.device)
        length = torch.tensor([run.groups.stop - run.groups.start for run in runs])
        spare = width.repeat_interleave(length.to(index.device)) - count  # slots of every group
        order = group.argsort(stable=True)
        place = torch.arange(len(order), device=index.device)
        place += (spare.cumsum(0) - spare)[group[order]]
        self.slot = torch.empty_like(order).scatter_(0, order, place)
        self.batches = list(self._collect(runs, order, place))

    def _collect(self, runs: list[Run], order: Tensor, place: Tensor) -> Iterator[Batch]:
        """Batch runs, given the visits sorted by group and the slot of each of these."""
        token = order // self.num_reads
        weight = None if self.weight is None else self.weight.flatten()[order]
        filled = token.new_zeros(self.num_slots).scatter_(0, place, 1)
        before = filled.cumsum(0) - filled
        first = 0
        while first < len(runs):
            last, start = first + 1, runs[first].slots.start
            while last < len(runs) and runs[last].slots.stop - start <= BATCH_SLOTS:
                last += 1
            slots = slice(start, runs[last - 1].slots.stop)
            visits = slice(runs[first].visits.start, runs[last - 1].visits.stop)
            yield Batch(
                runs[first:last], slots, token[visits],
                None if weight is None else weight[visits], before[slots] - visits.start,
            )  # fmt: skip
            first = last

    def outer_sum(
        self,
        left: Tensor,
        right: Tensor,
        name: str = "outer_sum",
        onto: Tensor | None = None,
    ) -> Tensor:
        """Sum left_t right_t' over each group, times the weight of the visit: (N, groups, r, p)."""
        table = onto
        if table is None:
            shape = (len(left), self.num_groups, left.shape[-1], right.shape[-1])
            table = scratch(name, shape, left)
        by_group, left, right = table.flatten(0, 1), left.flatten(0, 1), right.flatten(0, 1)
        for batch in self.batches:
            one, other = batch.take(left, batch.weight), batch.take(right)
            for run in batch.runs:
                tiles = batch.tiles(run, one).mT, batch.tiles(run, other)
                # Into given tensors, so that autocast leaves the sum's precision alone.
                if onto is None:
                    torch.bmm(*tiles, out=by_group[run.groups])
                else:
                    by_group[run.groups].baddbmm_(*tiles)
        return table

    def read(self, left: Tensor, table: Tensor) -> Tensor:
        """Contract each token's left vector with the weighted sum of its groups, -> (N, T, p)."""
        return self._sum_visits(self._visit(left, table.flatten(0, 1)))

    def read_left(self, right: Tensor, table: Tensor) -> Tensor:
        """Contract each token's right vector with the weighted sum of its groups, -> (N, T, r)."""
        return self._sum_visits(self._visit(right, table.flatten(0, 1).mT))

    def read_backward(self, left: Tensor, grad: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        """Find the gradients of a read: of its left vectors (N, T, r), of its weights (N, T, k)."""
        pulled = self._visit(grad, table.flatten(0, 1).mT)
        token = torch.arange(len(self.slot), device=left.device) // self.num_reads
        grad_weight = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            left.reshape(-1, left.shape[-1]), pulled, self.slot, token[:: self.num_reads], token, 0
        )
        return self._sum_visits(pulled), grad_weight.view(*self.shape[:2], -1)

    def _visit(self, x: Tensor, states: Tensor) -> Tensor:
        """Contract the vectors of tokens with the states of their groups, -> (slots, .)."""
        products, x = scratch("right", (self.num_slots, states.shape[-1]), x), x.flatten(0, 1)
        for batch in self.batches:
            taken, answers = batch.take(x), products[batch.slots]
            for run in batch.runs:
                into = batch.tiles(run, answers)
                torch.bmm(batch.tiles(run, taken), states[run.groups], out=into)
        return products

    def _sum_visits(self, products: Tensor) -> Tensor:
        """Sum what the visits of each token found, times their weights, -> (N, T, f)."""
        weight = None if self.weight is None else self.weight.reshape(-1, self.num_reads)
        total = F.embedding_bag(
            self.slot.view(-1, self.num_reads), products, mode="sum", per_sample_weights=weight
        )
        return total.view(*self.shape[:2], -1)


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
            most = min(BATCH_SLOTS, MAX_PADDED * more + SPARE_SLOTS)
            if wider * (last + 1 - first) > most:
                break
            width, total, last = wider, more, last + 1
        filled = slice(slots, slots + width * (last - first))
        yield Run(slice(first, last), slice(visits, visits + total), filled, width)
        first, visits, slots = last, visits + total, filled.stop
