"""Draw without replacement, many rows at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def distinct(num_rows: int, count: int, population: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different numbers of 0 .. population - 1 for every row, in random order.

    >>> rows = distinct(3, 5, 1000, torch.Generator().manual_seed(0))
    >>> rows.shape, [len(set(row.tolist())) for row in rows]
    (torch.Size([3, 5]), [5, 5, 5])

    Every ordered choice is equally likely.
    """
    if not 0 <= count <= population:
        raise ValueError(f"cannot draw {count} different numbers out of {population}")
    if population <= 4 * count:
        return torch.rand(num_rows, population, generator=generator).argsort(-1)[:, :count]
    # Draw again whatever repeats an earlier number of its row. Which places those are depends on
    # equalities alone, so renaming the numbers renames the outcome, and all outcomes are alike.
    drawn = torch.randint(population, (num_rows, count), generator=generator)
    while (again := _repeats(drawn)).any():
        drawn[again] = torch.randint(population, (int(again.sum()),), generator=generator)
    return drawn


def _repeats(rows: Tensor) -> Tensor:
    """Mark the numbers that occur earlier in their row."""
    ordered, place = rows.sort(dim=-1, stable=True)
    marked = torch.zeros_like(rows, dtype=torch.bool)
    return marked.scatter_(-1, place[:, 1:], ordered[:, 1:] == ordered[:, :-1])


def weighted_order(num_rows: int, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw all indices one after another without replacement, each with odds like its weight.

    >>> order = weighted_order(4000, torch.tensor([1.0, 3.0]), torch.Generator().manual_seed(0))
    >>> round((order[:, 0] == 1).double().mean().item(), 1)
    0.8

    A race: index g finishes after an exponential time of rate w(g), which is -log(1 - u) / w(g).
    It comes first with probability w(g) / sum w, and as waiting times have no memory, those still
    running race on as if they had just begun: the order of arrival is the order of drawing. (With
    -log of the times this is the Gumbel top-k trick.)
    """
    # Not `exponential_`, which draws other numbers where torch is built with another library.
    uniform = torch.rand(num_rows, len(weights), generator=generator, dtype=torch.float64)
    return (torch.log1p(-uniform) / weights).argsort(-1, descending=True)
