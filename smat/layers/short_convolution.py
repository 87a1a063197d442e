"""Short depthwise causal convolution with a decoding state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from smat.ops.convolve import convolve


class ShortConvolution(nn.Module):
    """y_t = SiLU(bias + sum over lags of w[lag] x[t - lag]), channel by channel.

    >>> conv = ShortConvolution(channels=8, width=4)
    >>> x = torch.randn(2, 10, 8)
    >>> whole = conv(x)
    >>> state = conv.next_state(x[:, :9])  # the last width - 1 inputs
    >>> torch.allclose(conv(x[:, 9:], state), whole[:, 9:], atol=1e-6)
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
        history = with_past(x, past, state)
        if first is not None:
            first = torch.cat([first.new_zeros(len(first), past), first + past], 1)
        return convolve(history, self.weight, self.bias, self.activation, first)[:, past:]

    def next_state(
        self,
        x: Tensor,
        state: Tensor | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """Keep the last width - 1 inputs of every row, or of every packed sequence.

        Rows have `lengths` (B,) tokens, all of them if it is None.
        """
        return last_inputs(x, self.width - 1, state, lengths, cu_seqlens)


def with_past(x: Tensor, count: int, state: Tensor | None) -> Tensor:
    """Put the `count` inputs before x (B, T, ...) in front of it, zeros if there were none."""
    if state is None:
        state = x.new_zeros(x.shape[0], count, *x.shape[2:])
    return torch.cat([state.to(x.dtype), x], 1)


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
    """
    length = x.shape[1]
    if cu_seqlens is not None:
        index = cu_seqlens[1:, None] - count + torch.arange(count, device=x.device)
        kept = x[0, index.clamp(min=0)]
        before = index < cu_seqlens[:-1, None]
        return kept.masked_fill(before.view(*before.shape, *[1] * (x.ndim - 2)), 0)
    history = with_past(x, count, state)
    if lengths is None:
        return history[:, length : length + count].clone()
    row = torch.arange(len(x), device=x.device)[:, None]
    return history[row, lengths[:, None] + torch.arange(count, device=x.device)]
