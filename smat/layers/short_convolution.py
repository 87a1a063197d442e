"""Short depthwise causal convolution with SiLU, forward and backward, and its decoding state.

Written with autograd, four taps are some thirty passes over arrays as large as the input, most of
them over fresh memory. Here a tile of tokens stays in the cache while all taps work on it, the
backward pass makes the sums before SiLU again, and only the input is saved.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from smat.layers.call import CallInfo, with_past
from smat.masks import SMatMask

TILE_ELEMENTS = 1 << 18
MAX_EDGES = 8  # of runs of tokens that may not look all the way back


class ShortConvolution(nn.Module):
    """y_t = SiLU(bias + sum over lags of w[lag] x[t - lag]), channel by channel.

    >>> conv = ShortConvolution(channels=8, width=4)
    >>> x = torch.randn(2, 10, 8)
    >>> state = conv.next_state(x[:, :9])  # the last width - 1 inputs
    >>> torch.allclose(conv(x[:, 9:], state), conv(x)[:, 9:], atol=1e-6)
    True

    `weight` is (channels, width), the tap of the token itself last.
    """

    def __init__(
        self,
        channels: int,
        width: int = 4,
        bias: bool = False,
        activation: bool = True,
        **made: Any,
    ) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"the width of a convolution must be 1 or more, got {width}")
        self.channels, self.width, self.activation = channels, width, activation
        self.weight = nn.Parameter(torch.empty(channels, width, **made))
        self.bias = nn.Parameter(torch.empty(channels, **made)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw as a convolution layer of torch does: uniform within width^(-1/2)."""
        bound = 1 / math.sqrt(self.width)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, state: Tensor | None = None, first: Tensor | None = None
    ) -> Tensor:
        """Convolve (B, T, C), after the inputs in `state` (B, width - 1, C) if given.

        `first` (B, T) or (1, T) is the first token of x that each token may look back to, negative
        for one in the state: `CallInfo.first_visible`.
        """
        if state is None:
            return convolve(x, self.weight, self.bias, self.activation, first)
        past = self.width - 1
        if first is not None:
            first = torch.cat([first.new_zeros(len(first), past), first + past], 1)
        history = with_past(x, past, state)
        return convolve(history, self.weight, self.bias, self.activation, first)[:, past:]

    def run(
        self, x: Tensor, call: CallInfo, name: str = "conv", mask: SMatMask | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Convolve the inputs of a call, after the state of that name, and return the next one.

        No token looks back over the start of its sequence, or over its boundary under `mask`.
        """
        past, state = call.inputs_before(name, x, self.width - 1), None
        if call.use_cache:
            state = self.next_state(x, past, call.lengths, call.cu_seqlens)
        return self(x, past, call.first_visible(mask)), state

    def next_state(
        self,
        x: Tensor,
        state: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Keep the `last_inputs` of every row, or of every packed sequence."""
        return last_inputs(x, self.width - 1, state, lengths, cu_seqlens)


def last_inputs(
    x: Tensor,
    count: int,
    state: Tensor | None = None,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Keep the last `count` inputs (B, T, ...) of every row, zeros before the first.

    >>> x = torch.tensor([[1, 2, 3], [4, 5, 0]])
    >>> last_inputs(x, 2, lengths=torch.tensor([3, 1]))
    tensor([[2, 3],
            [0, 4]])
    >>> last_inputs(x[:1], 2, cu_seqlens=torch.tensor([0, 1, 3]))
    tensor([[0, 1],
            [2, 3]])

    Rows have `lengths` (B,) tokens, all of them if it is None.
    """
    newest = torch.arange(count, device=x.device)
    if cu_seqlens is not None:
        index = cu_seqlens[1:, None] - count + newest
        before = index < cu_seqlens[:-1, None]
        kept = x[0, index.clamp(min=0)]
        return kept.masked_fill(before.view(*before.shape, *[1] * (x.ndim - 2)), 0)
    history = with_past(x, count, state)
    if lengths is None:
        return history[:, x.shape[1] :].clone()
    return history[torch.arange(len(x), device=x.device)[:, None], lengths[:, None] + newest]


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, first: Tensor | None = None
) -> Tensor:
    """Return SiLU(bias + sum over lags of weight[lag] x[t - lag]) for x (B, T, C), x before 0 as 0.

    >>> x = torch.tensor([[[1.0], [2.0], [4.0]]])
    >>> convolve(x, torch.tensor([[10.0, 1.0]]), None, activation=False).flatten()
    tensor([ 1., 12., 24.])
    """
    return _Convolve.apply(x, weight, bias, activation, first)


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, activation: bool, first: Tensor | None
    ) -> Tensor:
        taps, out = _taps(x, weight), torch.empty_like(x)
        for tile, since in _tiles(x, first, len(taps)):
            z = _sum_taps(_near(x, taps, tile), taps, bias, since, tile)
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
        taps = _taps(x, weight)
        grad_x = torch.empty_like(x, dtype=taps.dtype)
        grad_taps, grad_bias = torch.zeros_like(taps), taps.new_zeros(len(weight))
        for tile, since in _tiles(x, first, len(taps)):
            grad_z, near = grad[tile].to(taps.dtype), _near(x, taps, tile)
            if ctx.activation:
                z = _sum_taps(near, taps, bias, since, tile)
                grad_z = torch.ops.aten.silu_backward(grad_z, z)
            _spread_taps(grad_z, near, taps, since, tile, grad_x, grad_taps)
            if bias is not None:
                grad_bias += grad_z.sum((0, 1))
        to_bias = None if bias is None else grad_bias.to(bias.dtype)
        return grad_x.to(x.dtype), grad_taps.t().to(weight.dtype), to_bias, None, None


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    """Lay the weight out as (width, C), in fp32 or wider."""
    wide = torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)
    return weight.to(wide).t().contiguous()


def _tiles(
    x: Tensor, first: Tensor | None, width: int
) -> Iterator[tuple[tuple[slice, slice], Tensor | None]]:
    """Cut (B, T) into blocks of whole rows, or one row into ranges, in order of time.

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
    """Find the runs of tokens that may not look all the way back, or one that holds them."""
    token = torch.arange(first.shape[1], device=first.device)
    hidden = F.pad((first > (token - width + 1).clamp(min=0)).any(0), (1, 1))
    edges = torch.nonzero(hidden[1:] != hidden[:-1]).flatten().tolist()
    if len(edges) > MAX_EDGES:
        edges = [edges[0], edges[-1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _near(x: Tensor, taps: Tensor, tile: tuple[slice, slice]) -> Tensor:
    """Return the inputs of a tile behind those it looks back to, widened once for all taps."""
    rows, time = tile
    return x[rows, max(time.start - len(taps) + 1, 0) : time.stop].to(taps.dtype)


def _sum_taps(
    near: Tensor, taps: Tensor, bias: Tensor | None, first: Tensor | None, tile: tuple[slice, slice]
) -> Tensor:
    """Return the sums before SiLU at a tile's tokens."""
    z = _before(near, 0, None, tile)[1] * taps[-1]
    for lag in range(1, len(taps)):
        at, seen, _ = _before(near, lag, first, tile)
        z[:, at:].addcmul_(seen, taps[-1 - lag])
    return z if bias is None else z.add_(bias)


def _spread_taps(
    grad_z: Tensor,
    near: Tensor,
    taps: Tensor,
    first: Tensor | None,
    tile: tuple[slice, slice],
    grad_x: Tensor,
    grad_taps: Tensor,
) -> None:
    """Add what a tile gives to the gradients of taps and inputs; earlier tiles have begun them."""
    rows, time = tile
    grad_x[tile] = grad_z * taps[-1]
    grad_taps[-1] += (grad_z * _before(near, 0, None, tile)[1]).sum((0, 1))
    for lag in range(1, len(taps)):
        at, seen, hidden = _before(near, lag, first, tile)
        pull = grad_z[:, at:]
        grad_taps[-1 - lag] += (pull * seen).sum((0, 1))
        if hidden is not None:
            pull = pull.masked_fill(hidden, 0)
        begin = time.start + at - lag
        grad_x[rows, begin : begin + pull.shape[1]].addcmul_(pull, taps[-1 - lag])


def _before(
    near: Tensor, lag: int, first: Tensor | None, tile: tuple[slice, slice]
) -> tuple[int, Tensor, Tensor | None]:
    """Return the inputs `lag` before a tile's tokens, 0 where they may not look back so far.

    Before them comes the first token of the tile that has one; behind them what is hidden.
    """
    rows, time = tile
    length = time.stop - time.start
    at = min(max(lag - time.start, 0), length)
    end = near.shape[1] - lag
    seen = near[:, end - (length - at) : end]
    if first is None:
        return at, seen, None
    token = torch.arange(time.start + at, time.stop, device=first.device)
    mine = first if len(first) == 1 else first[rows]
    hidden = (token - lag < mine[:, time.start + at : time.stop]).unsqueeze(-1)
    return at, seen.masked_fill(hidden, 0), hidden
