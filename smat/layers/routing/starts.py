"""Where learned routing starts: write and read addresses that agree before any training.

Uncorrelated, they are a saddle: reads sum what other tokens wrote, and no gradient says which way
to turn. The paper names no start.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from smat.geometry import Geometry


@torch.no_grad()
def start_taps_(weight: Tensor, router_init: str) -> None:
    """Start the taps (channels, width) of a hash's convolution; the own token's tap is the last.

    >>> taps = torch.randn(1, 4)
    >>> start_taps_(taps, "previous_token")
    >>> taps
    tensor([[0., 0., 1., 0.]])

    A width of 1 has no token before, and takes its own.
    """
    width = weight.shape[-1]
    if router_init == "previous_token":
        nn.init.zeros_(weight)
        weight[:, max(width - 2, 0)] = 1
    elif router_init == "average":
        nn.init.constant_(weight, 1 / width)


@torch.no_grad()
def sum_last_taps_(weight: Tensor, count: int) -> None:
    """Start taps (channels, width) as the sum of the last `count` tokens.

    >>> taps = torch.randn(1, 3)
    >>> sum_last_taps_(taps, 2)
    >>> taps
    tensor([[0., 1., 1.]])
    """
    nn.init.zeros_(weight)
    weight[:, weight.shape[-1] - count :] = 1


@torch.no_grad()
def align_scorer_(
    scorer: nn.Linear, direction: Tensor, gain: Tensor, geometry: Geometry, scale: float
) -> None:
    """Let a scorer of types prefer those that hold the point to which its input is hashed.

    A coordinate z of the hash (bias 0) lies nearest to the centre c_b of its bin b, where
    z c_b - c_b^2 / 2 is largest, which is linear. So the type {x_k = b} scores scale times that,
    plus the mean of c^2 / 2. Types across the axes would score 0 in this way, averaged over their
    points; they keep their draw, so that some of them are read.

    `direction` (H, D, hidden_size) and `gain` (H, D) are those of a `HashProjection`.
    """
    field_size, heads = geometry.field_size, len(direction)
    share = torch.arange(field_size, device=gain.device, dtype=torch.float32) + 0.5
    centre = torch.special.ndtri(share / field_size)
    unit = nn.functional.normalize(direction.float(), dim=-1)
    along = gain.float().unsqueeze(-1) * (unit - unit.mean(-1, keepdim=True))  # of a layer norm
    weight = scorer.weight.view(heads, -1, scorer.in_features)
    bias = scorer.bias.view(heads, -1)
    first = 0
    for axis in range(geometry.ambient_dim):  # directions come by the place of their leading 1
        types = slice(first * field_size, (first + 1) * field_size)
        weight[:, types] = (scale * centre[:, None] * along[:, axis, None]).to(weight.dtype)
        bias[:, types] = (scale / 2 * (centre.square().mean() - centre.square())).to(bias.dtype)
        first += field_size ** (geometry.ambient_dim - 1 - axis)
