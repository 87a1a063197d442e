"""Batch rows by where they stand: those at one position meet every event together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Cohort:
    """Batch rows that stand at the same position: they meet every event together."""

    rows: list[int]
    index: Tensor | None  # the rows as an index, or None for the whole batch
    position: int
    built: int = 0  # slabs of the next type table that are finished
    segment: int = 0  # that the next token belongs to
    newest: int = 0  # edge that is open
    is_folded: bool = False  # whether what is written behind it will ever be distant
    quiet_until: int = 0  # nothing changes before this position

    def pick(self, x: Tensor) -> Tensor:
        """Take the rows of a tensor with the batch in front; a view if that is all of them."""
        return x if self.index is None else x[self.index]

    @property
    def where(self) -> slice | Tensor:
        """The rows, to be written to."""
        return slice(None) if self.index is None else self.index


def gather_cohorts(
    positions: Sequence[int], built: Sequence[int], device: torch.device
) -> list[Cohort]:
    """Collect the batch rows that stand at the same position and have built equally much.

    >>> cohorts = gather_cohorts([5, 7, 5], [0, 0, 0], torch.device("cpu"))
    >>> [(cohort.rows, cohort.position) for cohort in cohorts]
    [([0, 2], 5), ([1], 7)]
    """
    by_place: dict[tuple[int, int], list[int]] = {}
    for row, place in enumerate(zip(positions, built, strict=True)):
        by_place.setdefault(place, []).append(row)
    return [
        Cohort(rows, None if len(by_place) == 1 else torch.tensor(rows, device=device), *place)
        for place, rows in by_place.items()
    ]
