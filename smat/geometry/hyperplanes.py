"""Points, hyperplanes and their incidence over a prime field (Section 3, equation 4).

Index tables are integers only, built by broadcasting, and cached per (q, d, device).
"""

from __future__ import annotations

import torch
from torch import Tensor

from smat.geometry.field import from_digits, to_digits
from smat.geometry.tables import cached_table


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

    The leading 1 stands in the first coordinate first, then in the second, and so on; the
    coordinates behind it run in counting order.
    """
    groups = []
    for num_zeros in range(ambient_dim):
        tail = points(field_size, ambient_dim - num_zeros - 1, device)
        head = torch.zeros(len(tail), num_zeros + 1, dtype=torch.long, device=device)
        head[:, -1] = 1
        groups.append(torch.cat([head, tail], dim=-1))
    if not groups:
        return torch.zeros(0, 0, dtype=torch.long, device=device)
    return torch.cat(groups)


def direction_index(direction: Tensor, field_size: int) -> Tensor:
    """Number a nonzero vector's direction, whatever its scale: (..., D) -> (...)."""
    ambient_dim = direction.shape[-1]
    nonzero = direction % field_size != 0
    if not bool(nonzero.any(-1).all()):
        raise ValueError(
            f"a direction must have a nonzero coordinate modulo q = {field_size}, "
            f"got {direction.tolist()}"
        )
    lead = nonzero.long().argmax(-1)
    inverses = torch.tensor(
        [pow(value, -1, field_size) if value else 0 for value in range(field_size)],
        device=direction.device,
    )
    lead_value = torch.gather(direction % field_size, -1, lead.unsqueeze(-1))
    scaled = direction * inverses[lead_value] % field_size
    # Group sizes are q^(D-1), q^(D-2), ..., 1; what stands behind the leading 1 is the number.
    sizes = field_size ** torch.arange(ambient_dim - 1, -1, -1, device=direction.device)
    group_start = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    return group_start[lead] + from_digits(scaled, field_size) - sizes[lead]


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
    return on_plane.reshape(-1, field_size**ambient_dim)


@cached_table
def witness_types(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """Number the hyperplanes H_R that shatter the standard basis (lemma "affine hyperplanes").

    Entry R, a bit mask over the coordinates (bit l for e_(l+1)), is the type with
    e_l in H_R if and only if l in R: sum of the coordinates outside R is 0, and for the full
    R the sum of all coordinates is 1.
    """
    if ambient_dim == 0:
        return torch.zeros(1, dtype=torch.long, device=device)
    subset = torch.arange(2**ambient_dim, device=device)
    inside = (subset[:, None] >> torch.arange(ambient_dim, device=device)) & 1
    normal = 1 - inside
    normal[-1] = 1
    offset = torch.zeros_like(subset)
    offset[-1] = 1
    # The leading nonzero coordinate of every normal is 1 already, so the offset needs no scaling.
    return direction_index(normal, field_size) * field_size + offset
