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
accumulated in registers and written once. The lower-dimensional problems ride along (shears.py), so
that D-1 calls make a whole table and nothing is summed, copied or joined beside them. Columns are
taken in blocks so narrow that the q^2 rows which one slab of a shear mixes stay in cache, and the
rows of every intermediate table are ordered slab by slab; ``smat bench tabulate`` compares the
forms. A Fourier-slice form needs as many passes over the table and loses digits where states differ
in size, so there is none.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.geometry import hyperplanes
from smat.geometry.shears import backprojection_stages, tabulation_stages
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
    """Apply C to a stack of tables, (N, P, S) -> (N, B, S), in the table's own dtype.

    Where a type is a point, D < 2, the answer may be the table itself if no ``out`` is given.
    """
    num_types = max(1, field_size * hyperplanes.count_directions(field_size, ambient_dim))
    if method == "dense":
        incidence = hyperplanes.incidence(field_size, ambient_dim, table.device)
        return torch.matmul(incidence.to(table.dtype), table, out=out)
    transform = _tabulate_block if method == "factored" else _tabulate_block_by_incidence
    return _by_blocks(transform, table, out, num_types, field_size, ambient_dim)


def backproject_tables(
    table: Tensor,
    field_size: int,
    ambient_dim: int,
    method: str = "factored",
    out: Tensor | None = None,
) -> Tensor:
    """Apply C' to a stack of tables, (N, B, S) -> (N, P, S): the adjoint of tabulating."""
    num_profiles = field_size**ambient_dim
    if method == "dense":
        incidence = hyperplanes.incidence(field_size, ambient_dim, table.device)
        return torch.matmul(incidence.to(table.dtype).mT, table, out=out)
    transform = _backproject_block if method == "factored" else _backproject_block_by_incidence
    return _by_blocks(transform, table, out, num_profiles, field_size, ambient_dim)


def _by_blocks(
    transform: Callable[[Tensor, int, int], Tensor],
    table: Tensor,
    out: Tensor | None,
    num_answers: int,
    field_size: int,
    ambient_dim: int,
) -> Tensor:
    """Run a transform of (rows, columns) tables over blocks of columns that fit in cache.

    A single table that is no wider than a block is neither copied nor, without ``out``, written
    twice.
    """
    num_tables, _, num_columns = table.shape
    block = max(1, num_tables * num_columns)
    if table.device.type == "cpu":
        least, most = BLOCK_COLUMNS
        block = min(max(least, BLOCK_ELEMENTS // table.shape[1]), most) // 16 * 16
    if num_tables == 1 and num_columns <= block:
        rows = transform(table[0].contiguous(), field_size, ambient_dim).unsqueeze(0)
        return rows if out is None else out.copy_(rows)
    if out is None:
        out = table.new_empty(num_tables, num_answers, num_columns)
    group = max(1, block // max(1, num_columns))
    for first in range(0, num_tables, group):
        tables = slice(first, first + group)
        for column in range(0, num_columns, block):
            columns = slice(column, column + block)
            piece = table[tables, :, columns].transpose(0, 1)
            rows = transform(piece.reshape(len(piece), -1), field_size, ambient_dim)
            out[tables, :, columns] = rows.view(len(rows), *piece.shape[1:]).transpose(0, 1)
    return out


def _tabulate_block(table: Tensor, field_size: int, ambient_dim: int) -> Tensor:
    for stage in tabulation_stages(field_size, ambient_dim, table.device):
        table = _sum_rows(table, *stage)
    return table


def _backproject_block(table: Tensor, field_size: int, ambient_dim: int) -> Tensor:
    for stage in backprojection_stages(field_size, ambient_dim, table.device):
        table = _sum_rows(table, *stage)
    return table


def _tabulate_block_by_incidence(table: Tensor, field_size: int, ambient_dim: int) -> Tensor:
    if ambient_dim == 0:
        return table
    return _sum_rows(table, incident_points(field_size, ambient_dim, table.device))


def _backproject_block_by_incidence(table: Tensor, field_size: int, ambient_dim: int) -> Tensor:
    if ambient_dim == 0:
        return table
    return _sum_rows(table, incident_types(field_size, ambient_dim, table.device))


def _sum_rows(table: Tensor, index: Tensor, first: Tensor | None = None) -> Tensor:
    """Add up rows of a table: those that each row of an index names, or each run of a list."""
    return F.embedding_bag(index, table, first, mode="sum")


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
