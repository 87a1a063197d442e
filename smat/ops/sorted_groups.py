"""Groups that tokens name themselves: visits sorted by group, products of tiles of equal width.

A token may visit several groups, each with a weight of its own: the k types that a query reads. The
visits of a group fill tiles of at most ``TILE_VISITS``. Where groups are about as large, neighbours
are padded to one width and their states are used where they stand; else tiles of about one size are
collected and padded, which costs a copy of their states. Either way a product costs what dense ones
cost, for groups of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.ops.workspace import scratch

TILE_VISITS = 256  # of one group, at most
BATCH_VISITS = 1 << 14  # of the tiles that are multiplied together
FEW_VISITS = 8  # narrower tiles are not told apart by size
RUN_GROUPS = 128  # groups that stand side by side and are multiplied together
MAX_PADDED = 2  # visits with padding, against those without, up to which groups keep their order


class Tiles(NamedTuple):
    """Tiles of one width: the group of each, and its visits, padded with its own first one."""

    group: slice | Tensor
    visit: Tensor  # (tiles, width)
    padding: Tensor | None  # (tiles, width), True where a visit is padding
    some_empty: bool  # an empty group has no visit of its own to be padded with

    def targets(self, nowhere: int) -> Tensor:
        """List the visits one after the other, padding as a visit that there is not."""
        if self.padding is None:
            return self.visit.flatten()
        return self.visit.masked_fill(self.padding, nowhere).flatten()

    def states(self, by_group: Tensor) -> Tensor:
        """Take the tiles' states out of (groups, r, p)."""
        if isinstance(self.group, slice):
            return by_group[self.group]
        shape = (len(self.group), *by_group.shape[1:])
        return torch.index_select(by_group, 0, self.group, out=scratch("states", shape, by_group))


class SortedGroups:
    """Each token names its group, ``index`` (N, T), or its k groups, (N, T, k), and their weights.

    >>> groups = SortedGroups(torch.tensor([[1, 0, 1]]), num_groups=2)
    >>> groups.outer_sum(torch.ones(1, 3, 1), torch.tensor([[[1.0], [2.0], [4.0]]])).flatten()
    tensor([2., 5.])
    """

    def __init__(self, index: Tensor, num_groups: int, weight: Tensor | None = None) -> None:
        self.num_groups, self.shape, self.weight = num_groups, index.shape, weight
        self.num_visits, self.num_reads = index.numel(), index[0, :1].numel() or 1
        self.device = index.device
        row = torch.arange(len(index), device=index.device)
        entry = (row[:, None] * num_groups + index.flatten(1)).flatten()  # groups over all rows
        order = entry.argsort(stable=True)
        counts = torch.bincount(entry, minlength=len(index) * num_groups)
        self.tiles = list(_cut_tiles(order, counts))
        self.slot = self._find_slots()

    def _find_slots(self) -> Tensor:
        """Say where in the tiles, one after the other, each visit stands."""
        self.num_slots = sum(tiles.visit.numel() for tiles in self.tiles)
        places = torch.arange(self.num_slots, device=self.device)
        slot = places.new_empty(self.num_visits + 1)  # padding is dropped in the last place
        targets = [tiles.targets(self.num_visits) for tiles in self.tiles]
        if targets:
            slot.scatter_(0, torch.cat(targets), places)
        return slot[:-1]

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
        by_group = table.flatten(0, 1)
        in_order = all(isinstance(tiles.group, slice) for tiles in self.tiles)
        if onto is None and not (in_order and self.tiles):
            by_group.zero_()
        for tiles in self.tiles:
            one, other = self._take(left, tiles, "left"), self._take(right, tiles, "right")
            self._weigh(one, tiles)
            if tiles.some_empty and tiles.padding is not None:
                for part in (one, other):  # zero times a stranger's NaN would not be zero
                    part.masked_fill_(tiles.padding.unsqueeze(-1), 0)
            if not isinstance(tiles.group, slice):
                size = (len(one), one.shape[-1], other.shape[-1])
                # Into a given tensor, so that autocast leaves the sum's precision alone.
                product = torch.bmm(one.mT, other, out=one.new_empty(size))
                by_group.index_add_(0, tiles.group, product)
            elif onto is None:
                torch.bmm(one.mT, other, out=by_group[tiles.group])
            else:
                by_group[tiles.group].baddbmm_(one.mT, other)
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
        token = torch.arange(self.num_visits, device=left.device) // self.num_reads
        grad_weight = torch.ops.aten._embedding_bag_per_sample_weights_backward(
            left.reshape(-1, left.shape[-1]), pulled, self.slot, token[:: self.num_reads], token, 0
        )
        return self._sum_visits(pulled), grad_weight.view(*self.shape[:2], -1)

    def _visit(self, x: Tensor, states: Tensor) -> Tensor:
        """Contract the vectors of tokens with the states of their groups, -> (slots, .)."""
        width = states.shape[-1]
        products = scratch("right", (self.num_slots, width), x)
        first = 0
        for tiles in self.tiles:
            taken = self._take(x, tiles, "left")
            part = products[first : first + tiles.visit.numel()]
            torch.bmm(taken, tiles.states(states), out=part.view(*taken.shape[:2], width))
            first += tiles.visit.numel()
        return products

    def _sum_visits(self, products: Tensor) -> Tensor:
        """Sum what the visits of each token found, times their weights, -> (N, T, f)."""
        weight = None if self.weight is None else self.weight.reshape(-1, self.num_reads)
        total = F.embedding_bag(
            self.slot.view(-1, self.num_reads), products, mode="sum", per_sample_weights=weight
        )
        return total.view(*self.shape[:2], -1)

    def _weigh(self, taken: Tensor, tiles: Tiles) -> None:
        """Multiply vectors (tiles, width, f) by the weights of their visits, padding by 0."""
        if self.weight is not None:
            weight = self.weight.flatten()[tiles.visit]
        elif tiles.padding is not None:
            weight = torch.ones_like(tiles.visit, dtype=taken.dtype)
        else:
            return
        if tiles.padding is not None:
            weight.masked_fill_(tiles.padding, 0)
        taken.mul_(weight.unsqueeze(-1))

    def _take(self, x: Tensor, tiles: Tiles, name: str) -> Tensor:
        """Take the vectors of the tiles' visits out of (N, T, f), -> (tiles, width, f)."""
        token = tiles.visit if self.num_reads == 1 else tiles.visit // self.num_reads
        shape = (*token.shape, x.shape[-1])
        taken = scratch(name, shape, x)
        torch.index_select(x.flatten(0, 1), 0, token.flatten(), out=taken.view(-1, x.shape[-1]))
        return taken


def _cut_tiles(order: Tensor, counts: Tensor) -> Iterator[Tiles]:
    """Cut sorted visits into tiles, and collect tiles of about the same size."""
    num_visits, device = len(order), order.device
    if num_visits == 0:
        return
    offsets = counts.cumsum(0) - counts
    runs = counts.split(RUN_GROUPS)
    widths = torch.stack([run.max() for run in runs]).tolist()
    padded = sum(width * len(run) for width, run in zip(widths, runs, strict=True))
    if max(widths) <= TILE_VISITS and padded <= MAX_PADDED * num_visits:
        for place, width in enumerate(widths):
            some = slice(place * RUN_GROUPS, (place + 1) * RUN_GROUPS)
            yield _fill(some, offsets[some], counts[some], width, order)
        return
    tiles_of_group = -(-counts // TILE_VISITS)
    group = torch.arange(len(counts), device=device).repeat_interleave(tiles_of_group)
    before = tiles_of_group.cumsum(0) - tiles_of_group
    skipped = (torch.arange(len(group), device=device) - before[group]) * TILE_VISITS
    size, by_size = (counts[group] - skipped).clamp(max=TILE_VISITS).sort(descending=True)
    group = group[by_size]
    start = offsets[group] + skipped[by_size]
    for first, last in falling_runs(size.tolist()):
        some = slice(first, last)
        yield _fill(group[some], start[some], size[some], int(size[first]), order)


def falling_runs(sizes: list[int]) -> Iterator[tuple[int, int]]:
    """Cut falling sizes into runs that are padded by a third at most.

    >>> list(falling_runs([40, 35, 29, 8, 1]))
    [(0, 2), (2, 3), (3, 5)]
    """
    first = 0
    while first < len(sizes):
        width = sizes[first]
        last = first + 1
        least = 0 if width <= FEW_VISITS else 3 * width // 4
        most = first + max(1, BATCH_VISITS // width)
        while last < min(len(sizes), most) and sizes[last] >= least:
            last += 1
        yield first, last
        first = last


def _fill(group: slice | Tensor, start: Tensor, size: Tensor, width: int, order: Tensor) -> Tiles:
    """List the visits of tiles that start at given places of the sorted order."""
    place = torch.arange(width, device=order.device)
    padding = place >= size.unsqueeze(1)
    where = torch.where(padding, 0, place) + start.unsqueeze(1)
    visit = order[where.clamp(max=len(order) - 1)]
    least = int(size.min())
    return Tiles(group, visit, padding if least < width else None, least == 0)
