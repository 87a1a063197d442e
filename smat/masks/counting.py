"""Count the entries of a mask without building it (property iv of the theorem in Section 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from smat.geometry import Geometry
from smat.geometry.field import to_digits


def count_on_hyperplane(geometry: Geometry, type_index: Tensor, num_keys: Tensor) -> Tensor:
    """Count the keys `j < num_keys` whose positional profile `j mod P` lies on each hyperplane.

    >>> geometry = Geometry(vc_dim=3, field_size=3)
    >>> count_on_hyperplane(geometry, torch.tensor([0, 1, 2]), torch.tensor([9, 10, 5]))
    tensor([3, 3, 0])

    Every turn of P keys puts q^(D-1) of them on a hyperplane; the points below the remainder are
    counted digit by digit, so a query costs O(D) whatever its boundary is.

    Paper: P = `num_profiles`, D = d - 1 = `ambient_dim`; `type_index` and `num_keys` broadcast.
    """
    if geometry.ambient_dim == 0:
        return num_keys + torch.zeros_like(type_index)
    full_turns = num_keys // geometry.num_profiles
    per_turn = geometry.num_profiles // geometry.field_size
    return full_turns * per_turn + _count_below(
        geometry, type_index, num_keys % geometry.num_profiles
    )


def _count_below(geometry: Geometry, type_index: Tensor, limit: Tensor) -> Tensor:
    """Count the points numbered below `limit` on each hyperplane.

    A point is below the limit if it follows the limit's digits up to some axis and has a smaller
    digit there. If the direction is nonzero on a later axis, 1 in q of these points is on the
    hyperplane; else all the later digits are free and this axis alone must fit the offset.
    """
    field_size, ambient_dim = geometry.field_size, geometry.ambient_dim
    direction_index, offset = geometry.split_type(type_index)
    direction = geometry.directions(type_index.device)[direction_index]
    digits = to_digits(limit, field_size, ambient_dim)
    inverses = torch.tensor(
        [0] + [pow(value, -1, field_size) for value in range(1, field_size)],
        device=type_index.device,
    )
    total = torch.zeros_like(offset + limit)
    missing = offset  # what the remaining axes must add up to
    for axis in range(ambient_dim):
        coefficient, digit = direction[..., axis], digits[..., axis]
        num_free = ambient_dim - axis - 1
        later = (direction[..., axis + 1 :] != 0).any(-1)
        root = missing * inverses[coefficient] % field_size
        fits = torch.where(coefficient == 0, digit * (missing == 0), (root < digit).long())
        one_in_q = digit * field_size**num_free // field_size
        total = total + torch.where(later, one_in_q, fits * field_size**num_free)
        missing = (missing - coefficient * digit) % field_size
    return total
