"""Products of decay gates as exponentials of differences (lemma "Gated SMat").

``lambda`` is kept as a pair of fp64 numbers, the running sum and what its roundings lost, so that
exp(lambda_i - lambda_j) has all its digits even where gates of -1e-6 follow gates of -1e4. Only
differences are exponentiated, and a difference to an earlier token is never positive.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from smat.ops.pieces import Block

# exp(-1000) is 0 in every dtype: a gate below it forgets everything, and -inf would give inf - inf.
FORGETS = -1000.0


Counts = Tensor | slice  # numbers of tokens, or a range of them


class LogDecay:
    """Running sums of log-gates, (N, T) -> entries 0..T: entry t sums the first t gates.

    >>> decay = LogDecay(torch.tensor([[-1.0, -float("inf"), -0.5, -0.25]]))
    >>> decay.between(torch.tensor([4, 4]), torch.tensor([2, 1]), torch.float64)
    tensor([[0.4724, 0.0000]], dtype=torch.float64)

    ``between(i, j)`` is the product of gates j+1 .. i (1-based): how much of what was written
    after j tokens is left after i.
    """

    def __init__(self, log_decay: Tensor) -> None:
        gates = torch.nn.functional.pad(log_decay.double().clamp(min=FORGETS), (1, 0))
        self.total = gates.cumsum(-1)
        # What each rounded sum lost; a difference of neighbours is exact, or dwarfed by a gate.
        lost = gates - torch.diff(self.total, dim=-1, prepend=torch.zeros_like(gates[:, :1]))
        self.lost = lost.cumsum(-1)

    def between(self, later: Counts, earlier: Counts, dtype: torch.dtype) -> Tensor:
        """Multiply the gates between pairs of token counts, (...) -> (N, ...)."""
        return factor(self.difference(later, earlier), dtype)

    def triangle(self, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply the gates between all pairs of counts, (..., C) -> (N, ..., C, C), lower."""
        if dtype == torch.float64:
            return lower_triangle(self.total[:, counts], self.lost[:, counts])
        return lower_triangle(*split(self.difference(counts, counts[..., :1]), dtype))

    def difference(self, later: Counts, earlier: Counts) -> Tensor:
        """Sum the gates between pairs of token counts, (...) -> (N, ...)."""
        difference = self.total[:, later] - self.total[:, earlier]
        return difference.add_(self.lost[:, later] - self.lost[:, earlier])


def factor(difference: Tensor, dtype: torch.dtype) -> Tensor:
    """Find what is left after gates with a given sum."""
    return exp_or_zero_(difference.clamp(max=0.0), dtype).to(dtype)


def split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split fp64 numbers into two of a narrower dtype, which hold nearly all their digits."""
    coarse = x.to(dtype)
    return coarse, (x - coarse).to(dtype)


def lower_triangle(coarse: Tensor, fine: Tensor) -> Tensor:
    """Multiply the gates between all pairs of split sums, (..., C) -> (..., C, C); 0 above."""
    difference = coarse.unsqueeze(-1) - coarse.unsqueeze(-2)
    difference += fine.unsqueeze(-1)
    difference -= fine.unsqueeze(-2)
    difference += _above_diagonal(coarse.shape[-1], coarse.dtype, coarse.device)
    return exp_or_zero_(difference)


def exp_or_zero_(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Exponentiate, overwriting x; what would be subnormal in a dtype, x's own unless given, is 0.

    >>> exp_or_zero_(torch.tensor([0.0, -1.0, -90.0, -torch.inf]))
    tensor([1.0000, 0.3679, 0.0000, 0.0000])

    Processors exponentiate to subnormal numbers, and multiply them, tens of times slower.
    """
    lowest = math.log(torch.finfo(dtype or x.dtype).tiny)
    smallest = math.exp(lowest + 1e-3)
    return torch.threshold(x.clamp_(min=lowest + 5e-4).exp_(), smallest, 0.0)


class ChunkDecay:
    """The decay within the chunks of all blocks, found for the whole sequence at once."""

    def __init__(self, decay: LogDecay, blocks: Sequence[Block], dtype: torch.dtype) -> None:
        device = decay.total.device
        tokens = torch.arange(blocks[-1].stop, device=device)
        first, last = torch.empty_like(tokens), torch.empty_like(tokens)
        for block in blocks:
            span = slice(block.start, block.stop)
            first[span] = tokens[span] - (tokens[span] - block.start) % block.tile
            last[span] = (first[span] + block.tile).clamp(max=block.stop)
        self.decay, self.dtype = decay, dtype
        after = slice(1, len(tokens) + 1)  # the count of tokens up to each, and with it
        since_start = decay.difference(after, first)
        self.since_start = factor(since_start, dtype)
        self.until_end = decay.between(last, after, dtype)
        # Sums whose differences within a chunk have all digits: in fp64 as they are.
        self.parts = (
            (decay.total[:, after], decay.lost[:, after])
            if dtype == torch.float64
            else split(since_start, dtype)
        )

    def between(self, block: Block) -> Tensor:
        """What is left at each chunk edge of what was known at an earlier one, (N, K+1, K+1)."""
        device = self.since_start.device
        edges = torch.arange(block.start, block.stop + block.tile, block.tile, device=device)
        return self.decay.triangle(edges.clamp_(max=block.stop), self.dtype)


@lru_cache(maxsize=64)
def _above_diagonal(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-inf above the diagonal, 0 elsewhere."""
    with torch.inference_mode(False):
        return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu(1)


def grad_log_decay(moved: Tensor, log_decay: Tensor) -> Tensor:
    """Find the gradient of the gates from that of their running sums, (..., T).

    Gates enter only as exp(lambda_i) on y_i and exp(-lambda_j) on v_j, so ``moved``, the gradient
    of lambda_t, is <y_t, y_bar_t> - <v_t, v_bar_t>; a gate moves every later lambda.
    """
    suffix = moved.flip(-1).cumsum(-1).flip(-1)
    return torch.where(log_decay <= FORGETS, 0.0, suffix)
