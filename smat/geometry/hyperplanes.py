"""Points, hyperplanes and their incidence over a prime field (Section 3, equation 4).

Index tables are integers only, built by broadcasting, and kept for each (q, D, device).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from smat.geometry.field import to_digits

Table = TypeVar("Table")


def cached_table(
    build: Callable[[int, int, torch.device], Table],
) -> Callable[[int, int, torch.device], Table]:
    """Build a table once for each (field_size, ambient_dim, device).

    Outside inference mode: a table made inside it would be refused by every later backward pass.
    """
    return lru_cache(maxsize=64)(torch.inference_mode(False)(build))


def count_directions(field_size: int, ambient_dim: int) -> int:
    """Count normalised directions: (q^D - 1) / (q - 1)."""
    return int((field_size**ambient_dim - 1) // (field_size - 1))


@cached_table
def points(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """List every point of F_q^D in counting order, (P, D)."""
    return to_digits(torch.arange(field_size**ambient_dim, device=device), field_size, ambient_dim)


@cached_table
def directions(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """List every direction whose leading nonzero coordinate is 1, (A, D).

    The 1 stands in the first coordinate first, then in the second; the rest is in counting order.
    """
    leading = [torch.zeros(0, ambient_dim, dtype=torch.long, device=device)]
    for num_zeros in range(ambient_dim):
        tail = points(field_size, ambient_dim - num_zeros - 1, device)
        head = tail.new_zeros(len(tail), num_zeros + 1)
        head[:, -1] = 1
        leading.append(torch.cat([head, tail], dim=-1))
    return torch.cat(leading)


@cached_table
def offsets(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """Tabulate a . x mod q for every direction and point, (A, P)."""
    all_directions = directions(field_size, ambient_dim, device)
    all_points = points(field_size, ambient_dim, device)
    total = torch.zeros(len(all_directions), len(all_points), dtype=torch.long, device=device)
    for axis in range(ambient_dim):  # integer matrix products are slow or missing on some devices
        total += all_directions[:, axis, None] * all_points[None, :, axis]
    return total % field_size


@cached_table
def incidence(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """Mark which point lies on which hyperplane, C of equation 7, (B, P) bool."""
    if ambient_dim == 0:
        return torch.ones(1, 1, dtype=torch.bool, device=device)
    offset = torch.arange(field_size, device=device)
    on_plane = offsets(field_size, ambient_dim, device)[:, None, :] == offset[None, :, None]
    return on_plane.flatten(0, 1)
