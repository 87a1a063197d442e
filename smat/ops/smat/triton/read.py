"""Read table entries, and pull gradients back through them (equation 6, adjoint 11)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from smat.ops.smat.triton.groups import Visits, find_block, find_visits
from smat.ops.smat.triton.tokens import Side, block_size
from smat.ops.triton.features import feature, feature_derivative, load, load_features
from smat.ops.triton.launch import launch

PART = 32  # of the numbers that a product sums over: fp32 as three TF32 parts takes registers


@triton.jit
def read_kernel(
    first_block, order, blocks, num_visits, num_blocks, num_entries, start, stop, num_groups, phase,
    left, scale, weight, table, answer, sums, first_row, num_rows, length, table_row, begin_at,
    left_b, left_t, left_h, left_f, answer_b, answer_t, answer_h, answer_r, answer_f,
    K: tl.constexpr, V: tl.constexpr, SUMS: tl.constexpr, MAP: tl.constexpr, SHARE: tl.constexpr,
    HEADS: tl.constexpr, READS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Contract the visits of a block with their entry, for BLOCK_V values (`SortedGroups.read`).

        answer[visit] = scale weight map(left) table[x]

    and `sums` the same with the sums behind the state. Reads 4 K (V + SUMS) bytes a block (again,
    from cache, for each TILE of its visits), a visit's K numbers V / BLOCK_V times, and writes
    4 (V + SUMS) bytes a visit (ADD reads them too).
    """
    number = (first_block + tl.program_id(0)).to(tl.int64)
    tiles_v: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    tile_v = number % tiles_v
    v = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
    row, entry, begin, visits = find_block(
        blocks, number // tiles_v, first_row, num_blocks, num_entries, start, stop, num_groups,
        phase, HEADS, False,
    )  # fmt: skip
    is_v = v < V
    batch = row // num_rows
    left += batch * left_b
    answer += batch * answer_b + v[None, :] * answer_f
    table += (row - first_row) * table_row + entry * (K * V + K * SUMS)
    for tile in range(0, visits, TILE):
        index = tile + tl.arange(0, TILE)
        inside = index < visits
        token, head, read, own = find_visits(
            order, row, num_visits, begin, index, inside, start, num_groups, num_rows, length,
            HEADS, READS,
        )  # fmt: skip
        at = token * left_t + head // SHARE * left_h
        y = tl.zeros((TILE, BLOCK_V), tl.float32)
        z = tl.zeros((TILE,), tl.float32)
        for part in range(0, K, BLOCK_K):
            k = part + tl.arange(0, BLOCK_K)
            is_k = k < K
            here = inside[:, None] & is_k[None, :]
            x = load_features(left + at[:, None] + k[None, :] * left_f, here, MAP)
            state = load(table + k[:, None] * V + v[None, :], is_k[:, None] & is_v[None, :])
            y += tl.dot(x, state, input_precision=PRECISION)
            if sums is not None:
                z += tl.sum(x * load(table + K * V + k, is_k)[None, :], 1)
        factor = tl.full((TILE,), 1.0, tl.float32)
        if scale is not None:
            factor *= load(scale + own, inside)
        if weight is not None:
            factor *= load(weight + own * READS + read, inside)
        y *= factor[:, None]
        at = (token - begin_at) * answer_t + head * answer_h + read * answer_r
        here = inside[:, None] & is_v[None, :]
        if ADD:
            y += load(answer + at[:, None], here)
        tl.store(answer + at[:, None], y, mask=here)
        if sums is not None:
            own -= (batch + 1) * begin_at * (num_rows * HEADS)
            here = index < tl.where(tile_v == 0, visits, 0)
            tl.store(sums + own * READS + read, z * factor, mask=here)


@triton.jit
def pull_kernel(
    first_block, order, blocks, num_visits, num_blocks, num_entries, start, stop, num_groups, phase,
    left, right, scale, weight, last, table, answer, dots, first_row, num_rows, length, table_row,
    begin_at, left_b, left_t, left_h, left_f, right_b, right_t, right_h, right_f,
    answer_b, answer_t, answer_h, answer_r, answer_f,
    K: tl.constexpr, V: tl.constexpr, SUMS: tl.constexpr, MAP: tl.constexpr, SHARE: tl.constexpr,
    HEADS: tl.constexpr, READS: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Pull the visits of a block back through their entry, for BLOCK_K keys (`read_backward`).

        pulled = scale (table[x] right + sums[x] (1 or -last))
        answer[visit] = weight map'(left) pulled,    dots[visit] = map(left) . pulled

    Reads 4 K (V + SUMS) bytes a block (again, from cache, for each TILE of its visits), a visit's
    K numbers once and its V numbers K / BLOCK_K times, and writes 4 K bytes a visit (ADD reads them
    too).
    """
    number = (first_block + tl.program_id(0)).to(tl.int64)
    tiles_k: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile_k = number % tiles_k
    k = tile_k * BLOCK_K + tl.arange(0, BLOCK_K)
    row, entry, begin, visits = find_block(
        blocks, number // tiles_k, first_row, num_blocks, num_entries, start, stop, num_groups,
        phase, HEADS, False,
    )  # fmt: skip
    is_k = k < K
    batch = row // num_rows
    left += batch * left_b + k[None, :] * left_f
    right += batch * right_b
    answer += batch * answer_b + k[None, :] * answer_f
    table += (row - first_row) * table_row + entry * (K * V + K * SUMS)
    for tile in range(0, visits, TILE):
        index = tile + tl.arange(0, TILE)
        inside = index < visits
        token, head, read, own = find_visits(
            order, row, num_visits, begin, index, inside, start, num_groups, num_rows, length,
            HEADS, READS,
        )  # fmt: skip
        at = token * right_t + head * right_h
        pulled = tl.zeros((TILE, BLOCK_K), tl.float32)
        for part in range(0, V, BLOCK_V):
            v = part + tl.arange(0, BLOCK_V)
            is_v = v < V
            y = load(right + at[:, None] + v[None, :] * right_f, inside[:, None] & is_v[None, :])
            state = load(table + k[:, None] * V + v[None, :], is_k[:, None] & is_v[None, :])
            pulled += tl.dot(y, tl.trans(state), input_precision=PRECISION)
        if SUMS:
            behind = load(table + K * V + k, is_k)[None, :]
            if last is None:
                pulled += behind
            else:
                pulled -= load(last + own, inside)[:, None] * behind
        if scale is not None:
            pulled *= load(scale + own, inside)[:, None]
        here = inside[:, None] & is_k[None, :]
        at = token * left_t + head // SHARE * left_h
        x = tl.where(here, feature(load(left + at[:, None], here), MAP), 0.0)
        if dots is not None:
            at = (own * READS + read) * tiles_k + tile_k
            tl.store(dots + at, tl.sum(x * pulled, 1), mask=inside)
        if weight is not None:
            pulled *= load(weight + own * READS + read, inside)[:, None]
        pulled *= feature_derivative(x, MAP)
        at = (token - begin_at) * answer_t + head * answer_h + read * answer_r
        if ADD:
            pulled += load(answer + at[:, None], here)
        tl.store(answer + at[:, None], pulled, mask=here)


def read(
    visits: Visits, side: Side, table: Tensor, answer: Tensor, sums: Tensor | None, first_row: int,
    begin_at: int = 0, *, add: bool,
) -> None:  # fmt: skip
    """Write, or add, what visits of some rows read: (B, t, heads, reads, V) from `begin_at` on."""
    block_k, block_v = PART, block_size(side.num_values)
    launch(
        read_kernel, len(table) * visits.num_blocks * triton.cdiv(side.num_values, block_v),
        *visits.arguments, side.left, side.scale, side.weight, table, answer, sums, first_row,
        side.num_rows, side.left.shape[1], table.stride(0), begin_at,
        *side.left.stride(), *answer.stride(), ADD=add, BLOCK_K=block_k, BLOCK_V=block_v,
        **side.meta(visits),
    )  # fmt: skip


def pull(
    visits: Visits, side: Side, table: Tensor, answer: Tensor, dots: Tensor | None, first_row: int,
    begin_at: int = 0, *, add: bool,
) -> None:  # fmt: skip
    """Write, or add, gradients of left vectors: (B, t, heads, reads, K) from `begin_at` on."""
    block_k, block_v = block_size(side.num_keys), PART
    launch(
        pull_kernel, len(table) * visits.num_blocks * triton.cdiv(side.num_keys, block_k),
        *visits.arguments, side.left, side.right, side.scale, side.weight, side.last, table, answer,
        dots, first_row, side.num_rows, side.left.shape[1], table.stride(0), begin_at,
        *side.left.stride(), *side.right.stride(), *answer.stride(), ADD=add, BLOCK_K=block_k,
        BLOCK_V=block_v, **side.meta(visits),
    )  # fmt: skip


def count_parts(side: Side) -> int:
    """Count the parts of a vector that `pull` gives a dot product each."""
    return int(triton.cdiv(side.num_keys, block_size(side.num_keys)))
