"""The exclusive scan over the chunks of a block, and its adjoint, without a loop over chunks.

One product with a lower-triangular matrix, ones or decay factors, would do it, gated or not, but
costs the square of the number of chunks, and what lies below its diagonal is of rank one: the state
at an edge, decayed. So chunks stand in groups. Products within groups, a small product over the
edges of the groups, and one pass that hands every chunk the state at its group's start make two
levels: what a chunk costs grows with the root of their number.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


class ChunkScan:
    """Sums of chunks, added up behind a carried state.

    >>> scan = ChunkScan(torch.ones(1, 5, 5).tril())
    >>> sums, carry = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 4, 1), torch.full((1, 1, 1), 100.0)
    >>> grown = scan.grow(sums)
    >>> scan.before(sums, grown, carry).flatten(), scan.advance(grown, carry).flatten()
    (tensor([100., 101., 103., 107.]), tensor([115.]))

    ``between`` (N, C + 1, C + 1) is lower-triangular: what is left at edge a of the C chunks of
    what was known at edge b. In groups of g, G of them: ``inside`` (N G, g, g) what a chunk's start
    has of the sums of its group, ``since`` (N G, g, 1) of its group's start, ``until`` (N G, g, 1)
    what a group's end has of its sums, ``across`` (N, G + 1, G + 1) the same at the groups' edges.
    """

    def __init__(self, between: Tensor) -> None:
        self.num_rows, num_chunks = len(between), between.shape[-1] - 1
        self.group = _group_size(num_chunks)
        start, end = _edges(num_chunks, self.group, between.device)
        self.inside = between[:, start.unsqueeze(2), end.unsqueeze(1)].flatten(0, 1)
        self.since = between[:, start, start[:, :1]].flatten(0, 1).unsqueeze(-1)
        self.until = between[:, end[:, -1:], end].flatten(0, 1).unsqueeze(-1)
        self.across = between[:, :: self.group, :: self.group]

    def grow(self, sums: Tensor) -> Tensor:
        """Add up the chunk sums (N, C, F) behind nothing: what group edges hold, (N, G + 1, F)."""
        totals = torch.bmm(self.until.mT, self._in_groups(sums))
        return torch.bmm(self.across[:, :, 1:], totals.view(self.num_rows, -1, sums.shape[-1]))

    def before(self, sums: Tensor, grown: Tensor, carry: Tensor) -> Tensor:
        """Find what is before each chunk behind a state (N, r, p): (N C, r, p)."""
        flat = carry.flatten(1).unsqueeze(1)
        edges = torch.addcmul(grown[:, :-1], self.across[:, :-1, :1], flat)
        states = self.since * edges.view(-1, 1, edges.shape[-1])
        return states.baddbmm_(self.inside, self._in_groups(sums)).view(-1, *carry.shape[1:])

    def advance(self, grown: Tensor, state: Tensor) -> Tensor:
        """Carry a state (N, r, p) over the block."""
        return self.keep(state).add_(grown[:, -1].view_as(state))

    def keep(self, state: Tensor) -> Tensor:
        """Find what is left behind the block of a state before it; the adjoint is the same."""
        return self.across[:, -1:, :1] * state

    def backward(self, grad_before: Tensor | None, arriving: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the chunk sums (N, C, F), and of the carry through ``before``.

        ``arriving`` (N, r, p) is that of the state behind the block, ``grad_before`` (N C, r, p).
        """
        flat = arriving.flatten(1).unsqueeze(1)
        grad_totals = self.across[:, -1:, 1:].mT * flat
        grad_carry = torch.zeros_like(arriving)
        if grad_before is not None:
            grad_before = grad_before.view(-1, self.group, flat.shape[-1])
            grad_edges = torch.bmm(self.since.mT, grad_before).view_as(grad_totals)
            grad_totals.baddbmm_(self.across[:, :-1, 1:].mT, grad_edges)
            grad_carry.flatten(1).unsqueeze(1).baddbmm_(self.across[:, :-1, :1].mT, grad_edges)
        grad_sums = self.until * grad_totals.view(-1, 1, flat.shape[-1])
        if grad_before is not None:
            grad_sums.baddbmm_(self.inside.mT, grad_before)
        return grad_sums.view(self.num_rows, -1, flat.shape[-1]), grad_carry

    def _in_groups(self, sums: Tensor) -> Tensor:
        return sums.view(-1, self.group, sums.shape[-1])


@lru_cache(maxsize=64)
def plain_scan(
    num_rows: int, num_chunks: int, dtype: torch.dtype, device: torch.device
) -> ChunkScan:
    """Return the scan without gates."""
    with torch.inference_mode(False):
        ones = torch.ones(num_chunks + 1, num_chunks + 1, dtype=dtype, device=device)
        return ChunkScan(ones.tril_().expand(num_rows, -1, -1))


def _group_size(num_chunks: int) -> int:
    """Choose a divisor near the root, so that groups and their edges cost alike."""
    divisors = [size for size in range(1, num_chunks + 1) if num_chunks % size == 0]
    return min(divisors, key=lambda size: (size + num_chunks // size, -size))


@lru_cache(maxsize=64)
def _edges(num_chunks: int, group: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Number the edges at which chunks start and end, (G, g) each."""
    with torch.inference_mode(False):
        start = torch.arange(num_chunks, device=device).view(-1, group)
        return start, start + 1
