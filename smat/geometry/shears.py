"""Which rows each shear of a tabulation adds up, as index tables (spec: radon.py's formula).

A shear sums q rows of a table into each row of the next. So does the sum over the first coordinate,
which hands the directions with leading zeros on to a problem of one dimension less. So the shears
of all these problems run side by side: the table after step j holds, one behind the other, the
D-dimensional problem after step j, the (D-1)-dimensional one after step j-1, and so on, and D-1
``embedding_bag`` calls make the whole type table, in its final order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smat.geometry.row_sums import Stage
from smat.geometry.tables import cached_table


@cached_table
def tabulation_stages(field_size: int, ambient_dim: int, device: torch.device) -> tuple[Stage, ...]:
    """List the D-1 steps from profile states to type states."""
    return tuple(
        _stage(_rows_of_step(step, field_size, ambient_dim, device))
        for step in range(2, ambient_dim + 1)
    )


@cached_table
def backprojection_stages(
    field_size: int, ambient_dim: int, device: torch.device
) -> tuple[Stage, ...]:
    """List the adjoint steps, from type states to profile states."""
    return tuple(
        _stage(_rows_of_adjoint(step, field_size, ambient_dim, device))
        for step in range(ambient_dim, 1, -1)
    )


def _rows_of_step(
    step: int, field_size: int, ambient_dim: int, device: torch.device
) -> list[Tensor]:
    """Name the input rows of each output row, a matrix for every problem: its bags."""
    sheared = shear_indices(field_size, ambient_dim, device)[step - 2]
    num_points = field_size**ambient_dim
    if step == 2:  # the sum over the first coordinate begins the next problem
        return [sheared, torch.arange(num_points, device=device).view(field_size, -1).T]
    lower = _rows_of_step(step - 1, field_size, ambient_dim - 1, device)
    return [sheared, *(rows + num_points for rows in lower)]


def _rows_of_adjoint(
    step: int, field_size: int, ambient_dim: int, device: torch.device
) -> list[Tensor]:
    spread = unshear_indices(field_size, ambient_dim, device)[ambient_dim - step]
    num_points = field_size**ambient_dim
    if step == 2:
        below = torch.arange(num_points // field_size, device=device).repeat(field_size)
        return [torch.cat([spread, num_points + below[:, None]], 1)]
    lower = _rows_of_adjoint(step - 1, field_size, ambient_dim - 1, device)
    return [spread, *(rows + num_points for rows in lower)]


def _stage(bags: list[Tensor]) -> Stage:
    size = torch.cat([rows.new_full((len(rows),), rows.shape[1]) for rows in bags])
    return torch.cat([rows.flatten() for rows in bags]), size.cumsum(0) - size


@cached_table
def shear_indices(field_size: int, ambient_dim: int, device: torch.device) -> tuple[Tensor, ...]:
    """List, for each shear j = 2..D, the q input rows of every output row, (q^D, q).

    After shear j the rows are ordered by [x(j+1)..xD, a2..aj, y]: what the next shear mixes
    differs in few places, so that its slab is read while it is in cache.
    """
    return tuple(
        _row_index(
            _order_after(step, ambient_dim), _order_after(step - 1, ambient_dim),
            step, f"x{step}", -1, field_size, device,
        )
        for step in range(2, ambient_dim + 1)
    )  # fmt: skip


@cached_table
def unshear_indices(field_size: int, ambient_dim: int, device: torch.device) -> tuple[Tensor, ...]:
    """List the rows of the adjoint, last shear first: sum over aj of Wj[.., y + aj xj, ..]."""
    return tuple(
        _row_index(
            _order_after(step - 1, ambient_dim), _order_after(step, ambient_dim),
            step, f"a{step}", 1, field_size, device,
        )
        for step in range(ambient_dim, 1, -1)
    )  # fmt: skip


def _order_after(step: int, ambient_dim: int) -> list[str]:
    if step == 1:
        return ["y", *(f"x{axis}" for axis in range(2, ambient_dim + 1))]
    remaining = [f"x{axis}" for axis in range(step + 1, ambient_dim + 1)]
    return [*remaining, *(f"a{axis}" for axis in range(2, step + 1)), "y"]


def _row_index(
    rows_out: list[str],
    rows_in: list[str],
    step: int,
    summed: str,
    sign: int,
    field_size: int,
    device: torch.device,
) -> Tensor:
    """Number the input rows of each output row; axes are named as in the module's formula."""
    axes = [*rows_out, summed]
    value = torch.arange(field_size, device=device)
    coordinate = {
        name: value.view([-1 if other == place else 1 for other in range(len(axes))])
        for place, name in enumerate(axes)
    }
    shift = sign * coordinate[f"a{step}"] * coordinate[f"x{step}"]
    coordinate["y"] = (coordinate["y"] + shift) % field_size
    number = torch.zeros((), dtype=torch.long, device=device)
    for name in rows_in:
        number = number * field_size + coordinate[name]
    return number.expand([field_size] * len(axes)).reshape(-1, field_size).contiguous()
