"""Products of decay gates as exponentials of differences (lemma "Gated SMat").

``lambda`` is kept as a pair of fp64 numbers, the running sum and what its roundings lost, so that
exp(lambda_i - lambda_j) has all its digits even where gates of -1e-6 follow gates of -1e4. Only
differences are exponentiated, and a difference to an earlier token is never positive.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(-1000) is 0 in every dtype: a gate below it forgets everything, and -inf would give inf - inf.
FORGETS = -1000.0


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

    def between(self, later: Tensor, earlier: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply the gates between pairs of token counts, (...) -> (N, ...)."""
        difference = self.total[:, later] - self.total[:, earlier]
        difference = difference + (self.lost[:, later] - self.lost[:, earlier])
        return difference.clamp(max=0.0).exp().to(dtype)

    def triangle(self, counts: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply the gates between all pairs of counts, (..., C) -> (N, ..., C, C), lower."""
        total, lost = self.total[:, counts], self.lost[:, counts]
        if dtype == torch.float64:
            parts = (total, lost)
        else:  # relative to the first count, two fp32 numbers hold what one fp64 number does
            relative = (total - total[..., :1]) + (lost - lost[..., :1])
            coarse = relative.to(dtype)
            parts = (coarse, (relative - coarse).to(dtype))
        difference = parts[0].unsqueeze(-1) - parts[0].unsqueeze(-2)
        difference += parts[1].unsqueeze(-1)
        difference -= parts[1].unsqueeze(-2)
        difference += _above_diagonal(counts.shape[-1], dtype, counts.device)
        return difference.clamp_(max=0.0).exp_()


def _above_diagonal(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """-inf above the diagonal, 0 elsewhere."""
    return torch.full((size, size), -torch.inf, dtype=dtype, device=device).triu(1)


def grad_log_decay(moved: Tensor, log_decay: Tensor) -> Tensor:
    """Find the gradient of the gates from that of their running sums, (N, T).

    Gates enter only as exp(lambda_i) on phi_i and exp(-lambda_j) on psi_j, so ``moved``, the
    gradient of lambda_t, is <phi_t, phi_bar_t> - <psi_t, psi_bar_t>; a gate moves every later
    lambda.
    """
    suffix = moved.flip(-1).cumsum(-1).flip(-1)
    return torch.where(log_decay <= FORGETS, 0.0, suffix)
