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

Each shear adds q rows of a table per row of the next, an ``embedding_bag`` in sum mode: rows are
accumulated in registers and written once. Columns are taken in blocks so narrow that the q^2
rows which one slab of a shear mixes stay in cache, and the rows of every intermediate table are
ordered slab by slab; ``smat bench tabulate`` compares the forms. A Fourier-slice form needs as
many passes over the table and loses digits where states differ in size, so there is none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.geometry import hyperplanes
from smat.geometry.tables import cached_table

METHODS = ("factored", "algorithm2", "dense")
BLOCK_ELEMENTS = 1 << 19  # of a table's block of columns: 2 MB of fp32
BLOCK_COLUMNS = (128, 1024)  # narrower ones cost more to copy than they save, wider ones miss


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
    out: Tensor | None = None,
) -> Tensor:
    """Apply C to a stack of tables, (N, P, S) -> (N, B, S), in the table's own dtype."""
    num_types = max(1, field_size * hyperplanes.count_directions(field_size, ambient_dim))
    if out is None:
        out = table.new_empty(len(table), num_types, table.shape[-1])
    if method == "dense":
        incidence = hyperplanes.incidence(field_size, ambient_dim, table.device)
        return torch.matmul(incidence.to(table.dtype), table, out=out)
    transform = _tabulate_block if method == "factored" else _tabulate_block_by_incidence
    return _by_blocks(transform, table, out, field_size, ambient_dim)


def backproject_tables(
    table: Tensor,
    field_size: int,
    ambient_dim: int,
    method: str = "factored",
    out: Tensor | None = None,
) -> Tensor:
    """Apply C' to a stack of tables, (N, B, S) -> (N, P, S): the adjoint of tabulating."""
    if out is None:
        out = table.new_empty(len(table), field_size**ambient_dim, table.shape[-1])
    if method == "dense":
        incidence = hyperplanes.incidence(field_size, ambient_dim, table.device)
        return torch.matmul(incidence.to(table.dtype).mT, table, out=out)
    transform = _backproject_block if method == "factored" else _backproject_block_by_incidence
    return _by_blocks(transform, table, out, field_size, ambient_dim)


def _by_blocks(
    transform: Callable[[Tensor, int, int], list[Tensor]],
    table: Tensor,
    out: Tensor,
    field_size: int,
    ambient_dim: int,
) -> Tensor:
    """Run a transform of (rows, columns) tables over blocks of columns that fit in cache."""
    num_tables, _, num_columns = table.shape
    block = max(1, num_tables * num_columns)
    if table.device.type == "cpu":
        least, most = BLOCK_COLUMNS
        block = min(max(least, BLOCK_ELEMENTS // table.shape[1]), most) // 16 * 16
    group = max(1, block // max(1, num_columns))
    for first in range(0, num_tables, group):
        tables = slice(first, first + group)
        for column in range(0, num_columns, block):
            columns = slice(column, column + block)
            piece = table[tables, :, columns].transpose(0, 1)
            row = 0
            for rows in transform(piece.reshape(len(piece), -1), field_size, ambient_dim):
                target = out[tables, row : row + len(rows), columns]
                target.copy_(rows.reshape(len(rows), *piece.shape[1:]).transpose(0, 1))
                row += len(rows)
    return out


def _tabulate_block(table: Tensor, field_size: int, ambient_dim: int) -> list[Tensor]:
    """Return the type table as its runs of rows: leading 1 in the first coordinate, then on."""
    if ambient_dim < 2:
        return [table]
    sheared = table
    for index in shear_indices(field_size, ambient_dim, table.device):
        sheared = _sum_rows(sheared, index)
    lower = table.reshape(field_size, -1, table.shape[1]).sum(0)
    return [sheared, *_tabulate_block(lower, field_size, ambient_dim - 1)]


def _backproject_block(table: Tensor, field_size: int, ambient_dim: int) -> list[Tensor]:
    if ambient_dim < 2:
        return [table]
    num_sheared = field_size**ambient_dim
    spread = table[:num_sheared]
    for index in unshear_indices(field_size, ambient_dim, table.device):
        spread = _sum_rows(spread, index)
    (lower,) = _backproject_block(table[num_sheared:], field_size, ambient_dim - 1)
    spread.view(field_size, -1, table.shape[1]).add_(lower)
    return [spread]


def _tabulate_block_by_incidence(table: Tensor, field_size: int, ambient_dim: int) -> list[Tensor]:
    if ambient_dim == 0:
        return [table]
    return [_sum_rows(table, incident_points(field_size, ambient_dim, table.device))]


def _backproject_block_by_incidence(
    table: Tensor, field_size: int, ambient_dim: int
) -> list[Tensor]:
    if ambient_dim == 0:
        return [table]
    return [_sum_rows(table, incident_types(field_size, ambient_dim, table.device))]


def _sum_rows(table: Tensor, index: Tensor) -> Tensor:
    """Add up the rows of a table that each row of an index names."""
    return F.embedding_bag(index, table, mode="sum")


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
