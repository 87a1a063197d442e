"""Tokens that share a table entry: sums of outer products, and reads, by group (equation 6).

Distant keys are grouped by profile, recent queries by type. Three products are all that the long
range needs, forward and backward, with ``left`` (N, T, r), ``right`` (N, T, p), and a table of one
r x p state per row and group, (N, groups, r, p):

    outer_sum   table[x] = sum over t in group x of left_t right_t'   pool; adjoint of a read
    read        right_t  = left_t' table[x(t)]                       read; a gradient of pool
    read_left   left_t   = table[x(t)] right_t                       the other gradients

No product ever forms a state per token.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.ops.workspace import scratch


class Grouping(Protocol):
    """Tokens of N rows, each in one of ``num_groups`` groups of its row."""

    num_groups: int

    def outer_sum(
        self, left: Tensor, right: Tensor, name: str = "outer_sum", onto: Tensor | None = None
    ) -> Tensor:
        """Sum left_t right_t' over each group, -> (N, groups, r, p).

        The sums are added to a table, or else come in scratch memory of the given name.
        """

    def read(self, left: Tensor, table: Tensor) -> Tensor:
        """Contract each token's left vector with its group's state, -> (N, T, p)."""

    def read_left(self, right: Tensor, table: Tensor) -> Tensor:
        """Contract each token's right vector with its group's state, -> (N, T, r)."""


class PeriodicGroups:
    """Token t of a run belongs to group (first + t) mod num_groups: reshapes, no sort, no gather.

    >>> groups = PeriodicGroups(num_groups=2, first=1)
    >>> groups.outer_sum(torch.ones(1, 3, 1), torch.tensor([[[1.0], [2.0], [4.0]]])).flatten()
    tensor([2., 5.])
    """

    def __init__(self, num_groups: int, first: int) -> None:
        self.num_groups = num_groups
        self.first = first % num_groups

    def _grid(self, x: Tensor, name: str) -> Tensor:
        """(N, T, f) -> (N groups, turns, f), zeros where a turn is not full."""
        num_rows, length, width = x.shape
        stop = self.first + length
        num_turns = -(-stop // self.num_groups)
        grid = scratch(name, (num_turns, num_rows, self.num_groups, width), x)
        if num_rows == 1:
            flat = grid.view(-1, width)
            flat[: self.first] = 0
            flat[self.first : stop] = x[0]
            flat[stop:] = 0
        else:
            padded = F.pad(x, (0, 0, self.first, num_turns * self.num_groups - stop))
            turns = padded.view(num_rows, num_turns, self.num_groups, width)
            grid.copy_(turns.transpose(0, 1))
        return grid.view(num_turns, -1, width).transpose(0, 1)

    def outer_sum(
        self, left: Tensor, right: Tensor, name: str = "outer_sum", onto: Tensor | None = None
    ) -> Tensor:
        """Sum left_t right_t' over each group, -> (N, groups, r, p)."""
        by_group = self._grid(left, "left").mT, self._grid(right, "right")
        if onto is not None:
            onto.flatten(0, 1).baddbmm_(*by_group)
            return onto
        shape = (len(left), self.num_groups, left.shape[-1], right.shape[-1])
        table = scratch(name, shape, left)
        torch.bmm(*by_group, out=table.flatten(0, 1))
        return table

    def read(self, left: Tensor, table: Tensor) -> Tensor:
        """Contract each token's left vector with its group's state, -> (N, T, p)."""
        return self._read(left, table.flatten(0, 1))

    def read_left(self, right: Tensor, table: Tensor) -> Tensor:
        """Contract each token's right vector with its group's state, -> (N, T, r)."""
        return self._read(right, table.flatten(0, 1).mT)

    def _read(self, x: Tensor, states: Tensor) -> Tensor:
        num_rows, length, width = *x.shape[:2], states.shape[-1]
        grid = self._grid(x, "left")
        answers = scratch("right", (*grid.shape[:2], width), x)
        torch.bmm(grid, states, out=answers)
        turns = answers.view(num_rows, self.num_groups, -1, width).transpose(1, 2)
        in_order = turns.flatten(1, 2)[:, self.first : self.first + length]
        is_view = turns.shape[1] == 1 or self.num_groups == 1  # then flattening copied nothing
        return in_order.clone() if is_view else in_order
