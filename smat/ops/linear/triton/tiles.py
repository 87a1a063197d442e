"""Pieces that the kernels of the causal branch share: places of tokens, gates of a tile."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.triton.decay import left_between

TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal number of fp32


@triton.jit
def at_tokens(pointer, strides, batch, rows, head):
    """Point to what tokens have, of (B, T, H, ...)."""
    return pointer + batch * strides[0] + rows * strides[1] + head * strides[2]


@triton.jit
def gate_sums(cum, strides, batch, head, at):
    """Load sums of gates after so many tokens, of (2, B, H, T + 1): coarse, fine."""
    place = cum + batch * strides[1] + head * strides[2] + at
    return tl.load(place), tl.load(place + strides[0])


@triton.jit
def tile_gates(cum, strides, batch, head, rows, start, stop):
    """Multiply the gates of a chunk: since its start, until its end, over all of it."""
    if cum is None:
        ones = tl.where(rows < stop, 1.0, 0.0)
        return ones, ones, 1.0
    else:
        coarse, fine = gate_sums(cum, strides, batch, head, tl.minimum(rows + 1, stop))
        coarse_start, fine_start = gate_sums(cum, strides, batch, head, start)
        coarse_stop, fine_stop = gate_sums(cum, strides, batch, head, stop)
        since = left_between(coarse, fine, coarse_start, fine_start)
        until = left_between(coarse_stop, fine_stop, coarse, fine)
        return since, until, left_between(coarse_stop, fine_stop, coarse_start, fine_start)


@triton.jit
def gates_inside(cum, strides, batch, head, rows, stop):
    """Multiply the gates between all pairs of a tile's tokens; 0 for later keys."""
    sees = rows[:, None] >= rows[None, :]
    if cum is None:
        return tl.where(sees, 1.0, 0.0)
    else:
        coarse, fine = gate_sums(cum, strides, batch, head, tl.minimum(rows + 1, stop))
        left = left_between(coarse[:, None], fine[:, None], coarse[None, :], fine[None, :])
        return tl.where(sees, left, 0.0)


@triton.jit
def inverse_or_zero(normalizer):
    """Invert normalisers; 0 for a query that saw nothing."""
    sees_nothing = tl.abs(normalizer) < TINY
    return tl.where(sees_nothing, 0.0, 1.0 / tl.where(sees_nothing, 1.0, normalizer))
