"""Pool tokens by their table entry: sums of psi v' by profile, and their like by type (equation 6).

An entry holds the K x V state, row by row, and behind it the K sums that make the normaliser.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from smat.ops.smat.triton.groups import Visits, find_block, find_visits
from smat.ops.smat.triton.tokens import Side, block_size
from smat.ops.triton.features import load, load_features
from smat.ops.triton.launch import launch

SLAB = 1024  # columns of a table


@triton.jit
def pool_kernel(
    first_block, order, blocks, num_visits, num_blocks, num_entries, start, stop, num_groups, phase,
    left, right, scale, weight, last, table, over_move, first_row, num_rows, length, table_row,
    left_b, left_t, left_h, left_f, right_b, right_t, right_h, right_f,
    K: tl.constexpr, V: tl.constexpr, SUMS: tl.constexpr, MAP: tl.constexpr, SHARE: tl.constexpr,
    HEADS: tl.constexpr, READS: tl.constexpr, ONTO: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum the states of a block's visits, in tiles of BLOCK_K x BLOCK_V (`SortedGroups.pool`).

        table[x] = (over_move table[x]) + sum over visits to x of scale weight map(left) right'

    Behind the state stand the sums with 1 in the place of `right`, or with -`last`. Reads each
    visit's K and V numbers once for each tile of the state, K V / (BLOCK_K BLOCK_V) in all, and
    writes 4 K (V + SUMS) bytes a block.
    """
    number = (first_block + tl.program_id(0)).to(tl.int64)
    tiles_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tiles_v: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    tile_v = number % tiles_v
    k = number // tiles_v % tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)
    v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    row, entry, begin, visits = find_block(
        blocks, number // (tiles_v * tiles_k), first_row, num_blocks, num_entries, start, stop,
        num_groups, phase, HEADS, True,
    )  # fmt: skip
    batch = row // num_rows
    left += batch * left_b + k[None, :] * left_f
    right += batch * right_b + v[None, :] * right_f
    size = tl.where(entry < 0, 0, K)  # an unused block writes nothing
    is_k, is_v = k < size, v < V
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    sums = tl.zeros((BLOCK_K,), tl.float32)
    for tile in range(0, visits, TILE):
        index = tile + tl.arange(0, TILE)
        inside = index < visits
        token, head, read, own = find_visits(
            order, row, num_visits, begin, index, inside, start, num_groups, num_rows, length,
            HEADS, READS,
        )  # fmt: skip
        at = token * left_t + head // SHARE * left_h
        x = load_features(left + at[:, None], inside[:, None] & is_k[None, :], MAP)
        if scale is not None:
            x *= load(scale + own, inside)[:, None]
        if weight is not None:
            x *= load(weight + own * READS + read, inside)[:, None]
        at = token * right_t + head * right_h
        y = load(right + at[:, None], inside[:, None] & is_v[None, :])
        state += tl.dot(tl.trans(x), y, input_precision=PRECISION)
        if SUMS:
            if last is None:
                sums += tl.sum(x, 0)
            else:
                sums -= tl.sum(x * load(last + own, inside)[:, None], 0)
    table += (row - first_row) * table_row + entry * (K * V + K * SUMS)
    states = table + k[:, None] * V + v[None, :]
    inside = is_k[:, None] & is_v[None, :]
    if ONTO:
        left_over = 1.0
        if over_move is not None:
            left_over = tl.load(over_move + row)
        is_old = is_k
        if blocks is not None:  # those behind an entry's first are added to it later
            is_old = k < tl.where(entry < num_entries, K, 0)
        state += load(states, is_old[:, None] & is_v[None, :]) * left_over
        if SUMS:
            sums += load(table + K * V + k, is_old) * left_over
    tl.store(states, state, mask=inside)
    if SUMS:
        tl.store(table + K * V + k, sums, mask=k < tl.where(tile_v == 0, size, 0))


@triton.jit
def gather_kernel(
    first_block, table, last, first_row, num_entries, num_columns, table_row, SLAB: tl.constexpr
):
    """Add to each entry what further blocks of visits to it have pooled, in their order.

    Reads and writes 4 bytes a column of each further block, nothing of an entry without one.
    """
    number = (first_block + tl.program_id(0)).to(tl.int64)
    num_slabs = tl.cdiv(num_columns, SLAB)
    column = number % num_slabs * SLAB + tl.arange(0, SLAB)
    entry = number // num_slabs % num_entries
    row = number // num_slabs // num_entries
    last += (first_row + row) * num_entries + entry
    begin = tl.load(last - 1, mask=entry > 0, other=0) - entry
    end = tl.load(last) - entry - 1
    entries = table + row * table_row + column
    if end > begin:
        inside = column < num_columns
        total = load(entries + entry * num_columns, inside)
        for further in range(begin, end):
            total += load(entries + (num_entries + further) * num_columns, inside)
        tl.store(entries + entry * num_columns, total, mask=inside)


def pool(
    visits: Visits, side: Side, table: Tensor, first_row: int, over_move: Tensor | None, *,
    onto: bool,
) -> Tensor:  # fmt: skip
    """Pool the visits of some rows into a table (rows, pooled, S); its entries, (rows, entries, S).

    With `onto` the table keeps what it had, times `over_move` (of every row).
    """
    num_columns = table.shape[2]
    block_k, block_v = block_size(side.num_keys), block_size(side.num_values)
    tiles = triton.cdiv(side.num_keys, block_k) * triton.cdiv(side.num_values, block_v)
    launch(
        pool_kernel, len(table) * visits.num_blocks * tiles, *visits.arguments, side.left,
        side.right, side.scale, side.weight, side.last, table, over_move, first_row, side.num_rows,
        side.left.shape[1], table.stride(0), *side.left.stride(), *side.right.stride(),
        ONTO=onto, BLOCK_K=block_k, BLOCK_V=block_v, **side.meta(visits),
    )  # fmt: skip
    num_entries = visits.num_entries
    if visits.last is None:
        if visits.num_groups == num_entries:
            return table[:, :num_entries]
        groups = table[:, : visits.num_groups]
        return groups.unflatten(1, (-1, num_entries)).sum(1)
    if visits.num_blocks > num_entries:
        launch(
            gather_kernel, len(table) * num_entries * triton.cdiv(num_columns, SLAB), table,
            visits.last, first_row, num_entries, num_columns, table.stride(0), SLAB=SLAB,
        )  # fmt: skip
    return table[:, :num_entries]
