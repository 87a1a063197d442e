"""Tabulate type states from profile states, and back, on a GPU (Algorithm 2 as shears).

Directions with z leading zeros see the profile states summed over z coordinates, a problem of
D - z coordinates, which takes its own shears, one coordinate a launch. Tables lie as in
`smat.geometry.radon`: behind step j stand the problems z = 0, 1, ..., each as far as it came.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from smat.ops.triton.launch import launch

SLAB_ELEMENTS = 1 << 15  # of a program's q x q entries, so that they stay in the first cache
SLAB_COLUMNS = (8, 128)  # from one sector of memory on
TILE_ELEMENTS = 1 << 11  # of the entries that are summed at a time


@triton.jit
def shear_kernel(
    first_block, source, target, num_columns, source_table, target_table, others, at,
    summed_at, source_other, source_term, source_y, target_other, target_line, target_y,
    Q: tl.constexpr, SUMS: tl.constexpr, ADJOINT: tl.constexpr, COLUMNS: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Shear one coordinate, for some columns of one table and one value of all other coordinates.

        target[a, y] = sum over x of source[x, y - a x]         (mod q; `tabulate_tables`)
        target[x, y] = sum over a of source[a, y + a x]         (the adjoint; `backproject_tables`)

    With SUMS the source's q x q entries are also summed over y into the next problem's q; the
    adjoint adds those to all y. A program works through its q^2 entries of COLUMNS columns, which
    it reads q times, from memory once: 4 q^2 COLUMNS bytes in, as many out, q in q^2 more by SUMS.
    """
    block = (first_block + tl.program_id(0)).to(tl.int64)
    other = block % others
    num_slabs = tl.cdiv(num_columns, COLUMNS)
    slab = (block // others) % num_slabs
    table = block // (others * num_slabs)
    column = slab * COLUMNS + tl.arange(0, COLUMNS)
    is_column = (column < num_columns)[None, :]
    source += table * source_table
    target += table * target_table
    next_source = source + (summed_at + other) * num_columns
    next_target = target + (summed_at + other) * num_columns
    source += (at + other * source_other) * num_columns
    target += (at + other * target_other) * num_columns
    for start in range(0, Q * Q, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        line, y = entry // Q, entry % Q
        inside = (entry < Q * Q)[:, None] & is_column
        shift = line if ADJOINT else (Q - line) % Q
        total = tl.zeros((ENTRIES, COLUMNS), tl.float32)
        if ADJOINT and SUMS:
            row = (line * others).to(tl.int64) * num_columns
            total = tl.load(next_source + row[:, None] + column[None, :], mask=inside, other=0.0)
        sheared = y
        for term in range(Q):
            row = (term * source_term + sheared * source_y).to(tl.int64) * num_columns
            total += tl.load(source + row[:, None] + column[None, :], mask=inside, other=0.0)
            sheared += shift
            sheared = tl.where(sheared >= Q, sheared - Q, sheared)
        row = (line * target_line + y * target_y).to(tl.int64) * num_columns
        tl.store(target + row[:, None] + column[None, :], total, mask=inside)
    if SUMS and not ADJOINT:
        for start in range(0, Q, ENTRIES):
            line = start + tl.arange(0, ENTRIES)
            inside = (line < Q)[:, None] & is_column
            total = tl.zeros((ENTRIES, COLUMNS), tl.float32)
            for y in range(Q):
                row = (line * source_term + y * source_y).to(tl.int64) * num_columns
                total += tl.load(source + row[:, None] + column[None, :], mask=inside, other=0.0)
            row = (line * others).to(tl.int64) * num_columns
            tl.store(next_target + row[:, None] + column[None, :], total, mask=inside)


class Shear(NamedTuple):
    """One coordinate of one problem: where it lies before and after, and the strides of both."""

    others: int  # values of all other coordinates
    at: int  # where the problem's entries begin, before and after
    summed_at: int  # where the next problem's begin
    before: tuple[int, int, int]  # strides of the others, of x, of y
    after: tuple[int, int, int]  # strides of the others, of a, of y
    is_first: bool  # of its problem: the next problem starts with its sums over y


def shears(field_size: int, ambient_dim: int) -> Iterator[list[Shear]]:
    """List the shears of each step from profile states to type states."""
    q = field_size
    for step in range(2, ambient_dim + 1):
        at, found = 0, []
        for num_zeros in range(step - 1):
            entries = q ** (ambient_dim - num_zeros)
            others, is_first = entries // q**2, num_zeros == step - 2
            before = (1, others, q * others) if is_first else (q, q * others, 1)
            found.append(Shear(others, at, at + entries, before, (q * q, q, 1), is_first))
            at += entries
        yield found


def _sizes(field_size: int, ambient_dim: int) -> list[int]:
    """Count the entries of the table before each step, and behind the last."""
    powers = (field_size ** (ambient_dim - num_zeros) for num_zeros in range(ambient_dim))
    return list(itertools.accumulate(powers))


def tabulate(table: Tensor, field_size: int, ambient_dim: int) -> Tensor:
    """Apply C to fp32 tables, (N, P, S) -> (N, B, S); the table itself where a type is a point."""
    sizes = _sizes(field_size, ambient_dim)
    for step, size in zip(shears(field_size, ambient_dim), sizes[1:], strict=True):
        after = table.new_empty(len(table), size, table.shape[2])
        for shear in step:
            _run(shear, table, after, shear.before, shear.after, field_size, adjoint=False)
        table = after
    return table


def backproject(table: Tensor, field_size: int, ambient_dim: int) -> Tensor:
    """Apply C' to fp32 tables, (N, B, S) -> (N, P, S)."""
    steps = list(shears(field_size, ambient_dim))
    sizes = _sizes(field_size, ambient_dim)
    for step, size in zip(steps[::-1], sizes[-2::-1], strict=True):
        before = table.new_empty(len(table), size, table.shape[2])
        for shear in step:
            _run(shear, table, before, shear.after, shear.before, field_size, adjoint=True)
        table = before
    return table


def _run(
    shear: Shear, source: Tensor, target: Tensor, strides: tuple[int, int, int],
    to: tuple[int, int, int], field_size: int, *, adjoint: bool,
) -> None:  # fmt: skip
    num_tables, _, num_columns = source.shape
    least, most = SLAB_COLUMNS
    columns = 1 << max(1, SLAB_ELEMENTS // field_size**2).bit_length() - 1
    columns = min(max(least, columns), most)
    launch(
        shear_kernel, num_tables * triton.cdiv(num_columns, columns) * shear.others, source, target,
        num_columns, source.stride(0), target.stride(0), shear.others, shear.at, shear.summed_at,
        *strides, *to, Q=field_size, SUMS=shear.is_first, ADJOINT=adjoint, COLUMNS=columns,
        ENTRIES=TILE_ELEMENTS // columns,
    )  # fmt: skip
