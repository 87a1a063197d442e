"""Pieces that the kernels of the causal branch share: tiles of tokens, and gates of a tile.

A tile has ROWS tokens from the `first` on, `num_rows` of which are there. Offsets within it are
counted from its first token, whose place takes 64 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.triton.decay import left_between
from smat.ops.triton.features import feature, load

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of fp32


@triton.jit
def place_of(pointer, strides, batch, first, head):
    """Point to a token's part of (B, T, H, ...)."""
    return pointer + batch.to(tl.int64) * strides[0] + first * strides[1] + head * strides[2]


@triton.jit
def load_column(pointer, strides, batch, first, head, num_rows, ROWS: tl.constexpr):
    """Load a number a token, of (B, T, H): (ROWS,)."""
    rows = tl.arange(0, ROWS)
    place = place_of(pointer, strides, batch, first, head) + rows * strides[1]
    return load(place, rows < num_rows)


@triton.jit
def store_column(pointer, strides, batch, first, head, num_rows, x, ROWS: tl.constexpr):
    """Store a number a token."""
    rows = tl.arange(0, ROWS)
    place = place_of(pointer, strides, batch, first, head) + rows * strides[1]
    tl.store(place, x, mask=rows < num_rows)


@triton.jit
def is_there(num_rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Whether a tile's tokens and columns exist: (ROWS, columns)."""
    return (tl.arange(0, ROWS)[:, None] < num_rows) & (columns[None, :] < WIDTH)


@triton.jit
def load_tile(
    pointer, strides, batch, first, head, num_rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """Load some columns of tokens, of (B, T, H, WIDTH): (ROWS, columns)."""
    rows = tl.arange(0, ROWS)
    place = place_of(pointer, strides, batch, first, head) + rows[:, None] * strides[1]
    return load(place + columns[None, :], is_there(num_rows, columns, ROWS, WIDTH))


@triton.jit
def store_tile(
    pointer, strides, batch, first, head, num_rows, columns, x,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Store some columns of tokens."""
    rows = tl.arange(0, ROWS)
    place = place_of(pointer, strides, batch, first, head) + rows[:, None] * strides[1]
    tl.store(place + columns[None, :], x, mask=is_there(num_rows, columns, ROWS, WIDTH))


@triton.jit
def load_mapped(
    pointer, strides, batch, first, head, num_rows, columns,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Load some features of tokens; 0 where there is none, where elu would give 1."""
    x = load_tile(pointer, strides, batch, first, head, num_rows, columns, ROWS, WIDTH)
    return tl.where(is_there(num_rows, columns, ROWS, WIDTH), feature(x, MAP), 0.0)


@triton.jit
def load_state(
    pointer, slot, features, columns, num_features, K: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """Load a tile of a state, of (slots, K, V): features and columns in either order."""
    place = pointer + slot.to(tl.int64) * K * V + features * V + columns
    return load(place, (features < num_features) & (columns < V))


@triton.jit
def gate_sums(cum, strides, batch, head, at):
    """Load sums of gates after so many tokens, of (2, B, H, T + 1): coarse, fine."""
    place = cum + batch.to(tl.int64) * strides[1] + head * strides[2] + at
    return tl.load(place), tl.load(place + strides[0])


@triton.jit
def tile_gates(cum, strides, batch, head, first, num_rows, ROWS: tl.constexpr):
    """Multiply the gates of a chunk: since its start, until its end, over all of it."""
    rows = tl.arange(0, ROWS)
    if cum is None:
        ones = tl.where(rows < num_rows, 1.0, 0.0)
        return ones, ones, 1.0
    else:
        at = first + tl.minimum(rows + 1, num_rows)
        coarse, fine = gate_sums(cum, strides, batch, head, at)
        coarse_start, fine_start = gate_sums(cum, strides, batch, head, first)
        coarse_stop, fine_stop = gate_sums(cum, strides, batch, head, first + num_rows)
        since = left_between(coarse, fine, coarse_start, fine_start)
        until = left_between(coarse_stop, fine_stop, coarse, fine)
        return since, until, left_between(coarse_stop, fine_stop, coarse_start, fine_start)


@triton.jit
def gates_inside(cum, strides, batch, head, first, num_rows, ROWS: tl.constexpr):
    """Multiply the gates between all pairs of a tile's tokens; 0 for later keys."""
    rows = tl.arange(0, ROWS)
    sees = rows[:, None] >= rows[None, :]
    if cum is None:
        return tl.where(sees, 1.0, 0.0)
    else:
        at = first + tl.minimum(rows + 1, num_rows)
        coarse, fine = gate_sums(cum, strides, batch, head, at)
        left = left_between(coarse[:, None], fine[:, None], coarse[None, :], fine[None, :])
        return tl.where(sees, left, 0.0)


@triton.jit
def inverse_or_zero(normalizer):
    """Invert normalisers; 0 for a query that saw nothing."""
    sees_nothing = tl.abs(normalizer) < TINY
    return tl.where(sees_nothing, 0.0, 1.0 / tl.where(sees_nothing, 1.0, normalizer))
