"""Products of decay gates as exponentials of differences (lemma "Gated SMat").

``lambda`` is kept as a pair of fp64 numbers, the running sum and what its roundings lost, so that
exp(lambda_i - lambda_j) has all its digits even where gates of -1e-6 follow gates of -1e4. Only
differences are exponentiated, and a difference to an earlier token is never positive.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# exp(-1000) is 0 in every dtype: a gate below it forgets everything, and -inf would give inf - inf.
FORGETS = -1000.0


class LogDecay(NamedTuple):
    """Running sums of log-gates: entry t sums the first t of T gates, (..., T + 1).

    >>> decay = LogDecay.of(torch.tensor([[-1.0, -float("inf"), -0.5, -0.25]]))
    >>> decay.between(torch.tensor([4, 4]), torch.tensor([2, 1]), torch.float64)
    tensor([[0.4724, 0.0000]], dtype=torch.float64)

    ``between(i, j)`` is the product of the gates j+1 .. i (1-based): how much of what was written
    after j tokens is left after i.
    """

    total: Tensor
    lost: Tensor  # what the rounded sums lost

    @classmethod
    def of(cls, log_decay: Tensor) -> LogDecay:
        """Sum gates (..., T)."""
        gates = F.pad(log_decay.double().clamp(min=FORGETS), (1, 0))
        total = gates.cumsum(-1)
        # A difference of neighbours is exact, or dwarfed by a gate.
        lost = gates - torch.diff(total, dim=-1, prepend=torch.zeros_like(gates[..., :1]))
        return cls(total, lost.cumsum(-1))

    def difference(self, later: Tensor | slice | int, earlier: Tensor | slice | int) -> Tensor:
        """Sum the gates between numbers of tokens."""
        lost = self.lost[..., later] - self.lost[..., earlier]
        return self.total[..., later] - self.total[..., earlier] + lost

    def between(
        self, later: Tensor | slice | int, earlier: Tensor | slice | int, dtype: torch.dtype
    ) -> Tensor:
        """Multiply the gates between numbers of tokens."""
        return decay_factor(self.difference(later, earlier), dtype)


class ChunkDecay(NamedTuple):
    """What is left within and between C chunks of t tokens, N rows of M heads of values."""

    inside: Tensor  # (N, M, C, t, t), of key j at query i of its chunk; 0 above the diagonal
    since_start: Tensor  # (N, M, C, t, 1), of the state before the chunk
    until_end: Tensor  # (N, M, C, t, 1), of each key at the end of the chunk
    between: Tensor  # (N, M, C + 1, C + 1), at edge a of what was known at edge b; 0 above

    @classmethod
    def of(
        cls, decay: LogDecay, start: int, stop: int, size: int, dtype: torch.dtype
    ) -> ChunkDecay:
        """Take the chunks of one size between two tokens, of sums (N, M, T + 1)."""
        first, last = slice(start, stop, size), slice(start + size, stop + 1, size)
        own = LogDecay(*(x[..., start + 1 : stop + 1].unflatten(-1, (-1, size)) for x in decay))
        before, after = (
            LogDecay(*(x[..., edges].unsqueeze(-1) for x in decay)) for edges in (first, last)
        )
        since = own.total - before.total + (own.lost - before.lost)
        until = after.total - own.total + (after.lost - own.lost)
        edges = LogDecay(*(x[..., start : stop + 1 : size] for x in decay))
        return cls(
            between_pairs(own, since, dtype),
            decay_factor(since, dtype).unsqueeze(-1),
            decay_factor(until, dtype).unsqueeze(-1),
            lower_triangle(*(x - x[..., :1] for x in edges)).to(dtype),
        )


def decay_factor(difference: Tensor, dtype: torch.dtype) -> Tensor:
    """Find what is left after gates with a given sum, in fp64."""
    return exp_or_zero(difference.clamp(max=0.0), dtype).to(dtype)


def between_pairs(own: LogDecay, since: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the gates between all pairs of a chunk's tokens, (..., t) -> (..., t, t); 0 above.

    ``own`` are the sums at the tokens, ``since`` those since the chunk's start. In fp32 these are
    split into two numbers, which hold nearly all digits.
    """
    if dtype == torch.float64:
        return lower_triangle(*own)
    coarse = since.to(dtype)
    return lower_triangle(coarse, (since - coarse).to(dtype))


def lower_triangle(coarse: Tensor, fine: Tensor) -> Tensor:
    """Multiply the gates between all pairs of split sums, (..., n) -> (..., n, n); 0 above."""
    difference = coarse.unsqueeze(-1) - coarse.unsqueeze(-2)
    difference += fine.unsqueeze(-1)
    difference -= fine.unsqueeze(-2)
    difference += _minus_inf_above(coarse.shape[-1], coarse.dtype, coarse.device)
    return exp_or_zero(difference)


def exp_or_zero(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Exponentiate; what would be subnormal in a dtype, x's own unless given, is 0.

    >>> exp_or_zero(torch.tensor([0.0, -1.0, -90.0, -torch.inf]))
    tensor([1.0000, 0.3679, 0.0000, 0.0000])

    Processors exponentiate to subnormal numbers, and multiply them, tens of times slower.
    """
    lowest = math.log(torch.finfo(dtype or x.dtype).tiny)
    smallest = math.exp(lowest + 1e-3)
    return torch.threshold(x.clamp(min=lowest + 5e-4).exp_(), smallest, 0.0)


@lru_cache(maxsize=64)
def _minus_inf_above(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-inf above the diagonal, 0 elsewhere."""
    with torch.inference_mode(False):
        return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu(1)
