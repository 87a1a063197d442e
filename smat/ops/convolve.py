"""Depthwise causal convolution with SiLU, forward and backward, tile by tile.

Written with autograd, a convolution of four taps is some thirty passes over arrays as large as the
input, most of them over fresh memory. Here a tile of tokens stays in the cache while all taps work
on it, the backward pass makes the sums before SiLU again instead of keeping them, and only the
input is saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE_ELEMENTS = 1 << 18
MAX_EDGES = 8


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, first: Tensor | None = None
) -> Tensor:
    """Return SiLU(bias + sum over lags of weight[lag] x[t - lag]) for x (B, T, C), x before 0 as 0.

    >>> x = torch.tensor([[[1.0], [2.0], [4.0]]])
    >>> convolve(x, torch.tensor([[10.0, 1.0]]), None, activation=False).flatten()
    tensor([ 1., 12., 24.])

    `weight` is (C, width), the tap of the token itself last. `first` (B, T) or (1, T) is the first
    token that each may look back to.
    """
    return _Convolve.apply(x, weight, bias, activation, first)  # type: ignore[no-untyped-call]


def window(rows: Tensor, width: int) -> Tensor:
    """Name the tokens (R, width) that the outputs at rows (R,) are made of, 0 where there is none.

    >>> window(torch.tensor([0, 5]), width=3)
    tensor([[0, 0, 0],
            [3, 4, 5]])
    """
    return (rows[:, None] - torch.arange(width - 1, -1, -1, device=rows.device)).clamp(min=0)


def convolve_at(
    windows: Tensor, rows: Tensor, weight: Tensor, activation: bool, first: Tensor | None = None
) -> Tensor:
    """Return the outputs at rows (R,) alone, from the inputs at `window(rows)`, (B, R, width, C).

    >>> x, weight, rows = torch.randn(1, 9, 8), torch.randn(8, 3), torch.tensor([0, 7])
    >>> some = convolve_at(x[:, window(rows, width=3)], rows, weight, activation=True)
    >>> torch.allclose(some, convolve(x, weight, None, activation=True)[:, rows], atol=1e-6)
    True
    """
    token = rows[:, None] - torch.arange(weight.shape[1] - 1, -1, -1, device=rows.device)
    start = 0 if first is None else first[:, rows].unsqueeze(-1)
    seen = windows.masked_fill((token < start).unsqueeze(-1), 0)
    out = (seen * weight.t()).sum(-2)
    return (F.silu(out) if activation else out).to(windows.dtype)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, first: Tensor | None
    ) -> Tensor:
        wide = _wide(x, weight)
        taps, out = weight.to(wide).t().contiguous(), torch.empty_like(x)
        for tile, since in _tiles(x, first, len(taps)):
            z = _sum_taps(x, taps, bias, since, tile)
            out[tile] = F.silu(z, inplace=True) if activation else z
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.activation, first = inputs
        ctx.save_for_backward(x, weight, bias, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, first = ctx.saved_tensors
        wide = _wide(x, weight)
        taps = weight.to(wide).t().contiguous()
        grad_x = x.new_empty(x.shape, dtype=wide)
        grad_taps, grad_bias = torch.zeros_like(taps), taps.new_zeros(len(weight))
        for tile, since in _tiles(x, first, len(taps)):
            grad_z = grad[tile].to(wide)
            if ctx.activation:
                z = _sum_taps(x, taps, bias, since, tile)
                grad_z = torch.ops.aten.silu_backward(grad_z, z)
            _spread_taps(grad_z, x, taps, since, tile, grad_x, grad_taps)
            if bias is not None:
                grad_bias += grad_z.sum((0, 1))
        grad_weight = grad_taps.t().to(weight.dtype)
        to_bias = None if bias is None else grad_bias.to(bias.dtype)
        return grad_x.to(x.dtype), grad_weight, to_bias, None, None


def _wide(x: Tensor, weight: Tensor) -> torch.dtype:
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def _tiles(
    x: Tensor, first: Tensor | None, width: int
) -> Iterator[tuple[tuple[slice, slice], Tensor | None]]:
    """Cut (B, T) into blocks of whole rows, or one row into spans, in order of time.

    With each comes `first`, or None if all of its tokens may look back as far as they like.
    """
    batch, length, channels = x.shape
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        yield (slice(0, batch), slice(0, length)), first
        return
    tokens = max(1, TILE_ELEMENTS // max(1, channels))
    rows = max(1, tokens // max(1, length))
    hidden = [] if first is None else _hidden_runs(first, width)
    edges = {*range(0, length, tokens), length, *itertools.chain(*hidden)}
    for row in range(0, batch, rows):
        for start, stop in itertools.pairwise(sorted(edges)):
            is_hidden = any(begin <= start < end for begin, end in hidden)
            yield (slice(row, row + rows), slice(start, stop)), first if is_hidden else None


def _hidden_runs(first: Tensor, width: int) -> list[tuple[int, int]]:
    """Find the runs of tokens that may not look all the way back: what has to be masked.

    Where they are many, one run holds them all.
    """
    token = torch.arange(first.shape[1], device=first.device)
    hidden = F.pad((first > (token - width + 1).clamp(min=0)).any(0), (1, 1))
    edges = torch.nonzero(hidden[1:] != hidden[:-1]).flatten().tolist()
    if len(edges) > MAX_EDGES:
        edges = [edges[0], edges[-1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _sum_taps(
    x: Tensor, taps: Tensor, bias: Tensor | None, first: Tensor | None, tile: tuple[slice, slice]
) -> Tensor:
    """Return the sums before SiLU at a tile's tokens."""
    z = x[tile] * taps[-1]
    for lag in range(1, len(taps)):
        at, seen, _ = _before(x, lag, first, tile)
        z[:, at:].addcmul_(seen.to(z.dtype), taps[-1 - lag])
    return z if bias is None else z.add_(bias)


def _spread_taps(
    grad_z: Tensor,
    x: Tensor,
    taps: Tensor,
    first: Tensor | None,
    tile: tuple[slice, slice],
    grad_x: Tensor,
    grad_taps: Tensor,
) -> None:
    """Add what a tile gives to the gradients of taps and inputs; earlier tiles have begun them."""
    rows, span = tile
    grad_x[tile] = grad_z * taps[-1]
    grad_taps[-1] += (grad_z * x[tile]).sum((0, 1))
    for lag in range(1, len(taps)):
        at, seen, hidden = _before(x, lag, first, tile)
        part = grad_z[:, at:]
        grad_taps[-1 - lag] += (part * seen).sum((0, 1))
        if hidden is not None:
            part = part.masked_fill(hidden, 0)
        begin = max(span.start + at - lag, 0)
        grad_x[rows, begin : begin + part.shape[1]].addcmul_(part, taps[-1 - lag])


def _before(
    x: Tensor, lag: int, first: Tensor | None, tile: tuple[slice, slice]
) -> tuple[int, Tensor, Tensor | None]:
    """Return the inputs `lag` before a tile's tokens, where they begin, and what they hide.

    That is the first token that has one, and a mask of those that may not look back so far.
    """
    rows, span = tile
    length = span.stop - span.start
    at = min(max(lag - span.start, 0), length)
    begin = max(span.start + at - lag, 0)
    seen = x[rows, begin : begin + length - at]
    if first is None:
        return at, seen, None
    token = torch.arange(span.start + at, span.stop, device=first.device)
    mine = first if len(first) == 1 else first[rows]
    hidden = (token - lag < mine[:, span.start + at : span.stop]).unsqueeze(-1)
    return at, seen.masked_fill(hidden, 0), hidden
