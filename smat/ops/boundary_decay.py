"""What gates leave of distant keys, taken apart at the boundary (lemma "Gated SMat")."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smat.ops.decay import LogDecay


@dataclass(frozen=True)
class BoundaryDecay:
    """Factors of N rows, in the dtype of the sums; each is at most 1.

    >>> decay = BoundaryDecay(LogDecay(torch.full((1, 4), 0.5).log()), torch.float64)
    >>> decay.until(0, 2).flatten(), decay.over_move(0, 2).flatten()
    (tensor([0.5000, 1.0000], dtype=torch.float64), tensor([0.2500], dtype=torch.float64))
    >>> decay.since(2, torch.tensor([2, 3])).flatten()
    tensor([0.5000, 0.2500], dtype=torch.float64)
    """

    decay: LogDecay
    dtype: torch.dtype

    def until(self, start: int, stop: int) -> Tensor:
        """What is left of each key of a range at its end, the boundary: (N, t, 1)."""
        after = torch.arange(start + 1, stop + 1, device=self.decay.total.device)
        left = self.decay.between(torch.full_like(after, stop), after, self.dtype)
        return left.unsqueeze(-1)

    def since(self, boundary: int, position: Tensor) -> Tensor:
        """What is left of the type table at each query's position (t,): (N, 1, t, 1)."""
        after = position + 1
        left = self.decay.between(after, torch.full_like(after, boundary), self.dtype)
        return left[:, None, :, None]

    def over_move(self, earlier: int, later: int) -> Tensor:
        """What a move of the boundary leaves of what was pooled before, (N, 1, 1, 1)."""
        edge = torch.tensor([later, earlier], device=self.decay.total.device)
        return self.decay.between(edge[0], edge[1], self.dtype).view(-1, 1, 1, 1)
