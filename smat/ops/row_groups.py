"""Batch rows by where they stand: those at one position meet every event together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from smat.ops.fold import TableFold


@dataclass
class RowGroup:
    """Batch rows that stand at the same position; they meet every event together."""

    rows: list[int]
    index: Tensor | None  # the rows as an index, or None for the whole batch
    position: int
    built: int = 0  # slabs of the next type table that are finished
    fold: TableFold | None = None  # the one being spread over tokens
    credit: float = 0.0  # additions that it may do
    until: int = 0  # no event before this position


def group_rows(
    positions: Sequence[int], built: Sequence[int], device: torch.device
) -> list[RowGroup]:
    """Collect the batch rows that stand at the same position and have built equally much.

    >>> groups = group_rows([5, 7, 5], [0, 0, 0], torch.device("cpu"))
    >>> [(group.rows, group.position) for group in groups]
    [([0, 2], 5), ([1], 7)]
    """
    by_place: dict[tuple[int, int], list[int]] = {}
    for row, place in enumerate(zip(positions, built, strict=True)):
        by_place.setdefault(place, []).append(row)
    if len(by_place) == 1:
        ((position, slabs),) = by_place
        return [RowGroup(list(range(len(positions))), None, position, slabs)]
    return [
        RowGroup(rows, torch.tensor(rows, device=device), position, slabs)
        for (position, slabs), rows in by_place.items()
    ]
