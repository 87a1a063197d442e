"""Tabulate type states from profile states, and back (Algorithm 2, and its linear-time form).

``U = C F`` sums the states of the points on every hyperplane: a finite Radon transform. The
paper adds one state per nonzero of C, q^(2d-3) additions. Here the transform is factored into
shears, one coordinate at a time, and needs (d-2) q^d + O(d q^(d-1)) additions: linear in the
sequence length for every d, and still nothing but additions of non-negative terms.

For the directions whose leading 1 stands first, start from ``W1[y, x2..xD] = F[y, x2..xD]``
and for j = 2..D

    Wj[a2..aj, y, x(j+1)..xD] = sum over xj of W(j-1)[a2..a(j-1), y - aj xj, xj, x(j+1)..xD];

then ``U[a2..aD, b] = WD[a2..aD, b]``. Directions with leading zeros see F summed over its first
coordinate: the same problem, one dimension lower.

Each shear adds q rows of a table per row of the next (row_sums.py). The lower-dimensional problems
ride along (shears.py), so that D-1 sums make a whole table and nothing is summed, copied or joined
beside them. The rows of every intermediate table are ordered slab by slab, so that the q^2 rows
which one slab of a shear mixes stay in cache; ``smat bench tabulate`` compares the forms. A
Fourier-slice form needs as many passes over the table and loses digits where states differ in size,
so there is none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from smat.geometry import hyperplanes
from smat.geometry.row_sums import Stage, sum_rows
from smat.geometry.shears import backprojection_stages, tabulation_stages
from smat.geometry.tables import cached_table

METHODS = ("factored", "algorithm2", "dense")


def tabulation_cost(field_size: int, ambient_dim: int, method: str = "factored") -> int:
    """Count the state additions of one tabulation (a sum of k states counts k).

    >>> tabulation_cost(23, 3, "algorithm2"), tabulation_cost(23, 3, "factored")
    (6728351, 584545)
    """
    check_method(method)
    num_profiles = field_size**ambient_dim
    num_directions = hyperplanes.count_directions(field_size, ambient_dim)
    if ambient_dim == 0:
        return 1
    if method == "dense":
        return num_directions * field_size * num_profiles
    if method == "algorithm2":
        return num_directions * num_profiles
    if ambient_dim == 1:  # a hyperplane of a line is one of its points: nothing to add
        return 0
    shears = (ambient_dim - 1) * num_profiles * field_size
    return shears + num_profiles + tabulation_cost(field_size, ambient_dim - 1, method)


def tabulate_tables(
    table: Tensor,
    field_size: int,
    ambient_dim: int,
    method: str = "factored",
    *,
    out: Tensor | None = None,
    place: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Apply C to a stack of tables, (N, P, S) -> (N, B, S), in the table's own dtype.

    Where a type is a point, D < 2, the answer may be the table itself if no ``out`` is given. But
    for the dense form, `place` and `order` may say where points stand and which types are wanted
    where, as `sum_rows` takes them.
    """
    shape = (field_size, ambient_dim, table.device)
    if method == "dense":
        _check_own_order(place, order)
        incidence = hyperplanes.incidence(*shape)
        return torch.matmul(incidence.to(table.dtype), table, out=out)
    stages = (
        tabulation_stages(*shape) if method == "factored" else _only_stage(incident_points, *shape)
    )
    return sum_rows(table, stages, out=out, place=place, order=order)


def backproject_tables(
    table: Tensor,
    field_size: int,
    ambient_dim: int,
    method: str = "factored",
    *,
    out: Tensor | None = None,
    place: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Apply C' to a stack of tables, (N, B, S) -> (N, P, S): the adjoint of tabulating."""
    shape = (field_size, ambient_dim, table.device)
    if method == "dense":
        _check_own_order(place, order)
        incidence = hyperplanes.incidence(*shape)
        return torch.matmul(incidence.to(table.dtype).mT, table, out=out)
    stages = (
        backprojection_stages(*shape)
        if method == "factored"
        else _only_stage(incident_types, *shape)
    )
    return sum_rows(table, stages, out=out, place=place, order=order)


def _check_own_order(place: Tensor | None, order: Tensor | None) -> None:
    given = [name for name, x in (("place", place), ("order", order)) if x is not None]
    if given:
        raise ValueError(f"the dense form takes rows in their own order, got {' and '.join(given)}")


def _only_stage(
    rows_of: Callable[[int, int, torch.device], Tensor],
    field_size: int,
    ambient_dim: int,
    device: torch.device,
) -> tuple[Stage, ...]:
    """Return the one step of Algorithm 2, none if a type is a point."""
    if ambient_dim == 0:
        return ()
    rows = rows_of(field_size, ambient_dim, device)
    return ((rows.flatten(), rows.shape[1] * torch.arange(len(rows), device=device)),)


@cached_table
def incident_points(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """List the q^(D-1) points of every hyperplane, (B, q^(D-1)): the rows of Algorithm 2."""
    offset = hyperplanes.offsets(field_size, ambient_dim, device)
    return offset.argsort(dim=1, stable=True).reshape(-1, field_size ** (ambient_dim - 1))


@cached_table
def incident_types(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """List the A hyperplanes through every point, (P, A)."""
    offset = hyperplanes.offsets(field_size, ambient_dim, device)
    first_type = field_size * torch.arange(len(offset), device=device)
    return (first_type[:, None] + offset).T.contiguous()


def check_method(method: str) -> None:
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, got {method!r}")
