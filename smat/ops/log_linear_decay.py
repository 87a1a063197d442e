"""Log-linear attention with scalar decay over a tree of chunks, forward and backward.

A decay factor commutes with everything, so a query carries the decay since its block began and a
block's summary stands where the block ends: every height of the tree is one batched product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smat.ops.decay import FORGETS, LogDecay
from smat.ops.fenwick import (
    gather_levels,
    heights,
    level_table,
    odd_blocks,
    pack,
    pairs_of,
    spread_levels,
    unpack,
)
from smat.ops.wy import TILES_PER_BLOCK, compute_dtype


class DecayTree:
    """One call's inputs as rows of chunks (B H, chunks, c, f)."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        level_weights: Tensor,
        log_decay: Tensor,
        scale: float,
        chunk_size: int,
    ) -> None:
        dtype = compute_dtype(q, k, v, level_weights)
        self.given = (q, k, v, level_weights, log_decay)
        self.scale, self.chunk_size = scale, chunk_size
        self.q, self.k, self.v, self.weights = (pack(x, chunk_size, dtype) for x in self.given[:4])
        self.q = self.q * scale
        self.gates = pack(log_decay.unsqueeze(-1), chunk_size, torch.float64).flatten(1)
        self.decay = LogDecay(self.gates)
        self.num_chunks = self.q.shape[1]
        self.levels = level_table(chunk_size, level_weights.shape[-1], self.q)
        # How many tokens have been read after each one.
        counts = torch.arange(1, self.gates.shape[1] + 1, device=q.device)
        self.counts = counts.view(self.num_chunks, chunk_size)
        self.edges = self.counts[:, :1] - 1
        until_end = self.decay.between(self.counts[:, -1:], self.counts, dtype)
        self.until_end = until_end.unsqueeze(-1)

    def heights(self) -> list[tuple[int, int]]:
        return list(heights(self.num_chunks, self.chunk_size, self.weights.shape[-1]))

    def blocks(self) -> list[tuple[slice, slice]]:
        """Rows and chunks that are handled together."""
        num_rows = len(self.q)
        chunks = min(TILES_PER_BLOCK, self.num_chunks)
        rows = max(1, TILES_PER_BLOCK // chunks)
        return [
            (slice(row, row + rows), slice(chunk, chunk + chunks))
            for row in range(0, num_rows, rows)
            for chunk in range(0, self.num_chunks, chunks)
        ]

    def inside(self, rows: slice, chunks: slice) -> Tensor:
        """Decay inside chunks, (tiles, c, c)."""
        part = LogDecay(self.gates.view(self.q.shape[:3])[rows, chunks].flatten(0, 1))
        return part.triangle(self.counts[0], self.q.dtype)

    def summaries(self) -> list[Tensor]:
        """Sum k v' over blocks of 1, 2, 4, ... chunks, decayed to the block's end."""
        table = torch.matmul((self.k * self.until_end).mT, self.v)
        tables = [table]
        for size, _ in self.heights()[:-1]:
            left, right = pairs_of(table)
            table = torch.addcmul(right, self._over_right(size, left.shape[1]), left)
            tables.append(table)
        return tables

    def _over_right(self, size: int, pairs: int) -> Tensor:
        """Decay over the right block of every whole pair, (rows, pairs, 1, 1)."""
        right = self.edges[:, 0][size :: 2 * size][:pairs]
        factor = self.decay.between(right + size * self.chunk_size, right, self.q.dtype)
        return factor[..., None, None]

    def _since_block(self, size: int) -> list[Tensor]:
        """Decay since the odd block began, for the blocks of `odd_blocks`, (rows, ..., c, 1)."""
        later = [counts[0] for _, counts in odd_blocks(self.counts.unsqueeze(0), size)]
        found = [self.decay.between(x, x[:, :1, :1] - 1, self.q.dtype) for x in later]
        return [x.unsqueeze(-1) for x in found]

    def forward(self) -> Tensor:
        y = torch.empty_like(self.v)
        for rows, chunks in self.blocks():
            q, k, v, weights = (
                x[rows, chunks].flatten(0, 1) for x in (self.q, self.k, self.v, self.weights)
            )
            scores = torch.bmm(q, k.mT).mul_(self.inside(rows, chunks))
            scores.mul_(spread_levels(weights, self.levels))
            y[rows, chunks] = torch.bmm(scores, v).view_as(y[rows, chunks])
        for (size, level), table in zip(self.heights(), self.summaries(), strict=False):
            weights = self.weights[..., level : level + 1]
            views = zip(
                odd_blocks(self.q, size), odd_blocks(weights, size), odd_blocks(y, size),
                self._since_block(size), strict=True,
            )  # fmt: skip
            for (even, q), (_, weight), (_, target), decay in views:
                reads = torch.matmul((q * (weight * decay)).flatten(2, 3), table[:, even])
                target += reads.view_as(target)
        return unpack(y, self.given[2])

    def backward(self, grad_out: Tensor) -> list[Tensor]:
        grad_y = pack(grad_out, self.chunk_size, self.q.dtype)
        tables = self.summaries()
        grads = [torch.zeros_like(x) for x in (self.q, self.k, self.v, self.weights)]
        grad_table = torch.zeros_like(tables[-1])
        for (size, level), table in reversed(list(zip(self.heights(), tables, strict=False))):
            if table is not tables[-1]:
                grad_table = self._unpair(table, grad_table, size)
            self._read_backward(size, level, table, grad_table, grad_y, grads)
        self._chunks_backward(grad_y, grad_table, grads)
        # A gate enters only as exp(G_t) on q_t and exp(-G_s) on k_s, and moves every later G.
        flow = (self.q * grads[0]).sum(-1, dtype=torch.float64)
        flow -= (self.k * grads[1]).sum(-1, dtype=torch.float64)
        grad_gates = flow.flatten(1).flip(-1).cumsum(-1).flip(-1)
        grad_gates = torch.where(self.gates <= FORGETS, 0.0, grad_gates)
        grads[0].mul_(self.scale)
        found = [unpack(x, like) for x, like in zip(grads, self.given[:4], strict=True)]
        gates = grad_gates.view(*self.q.shape[:3], 1)
        return [*found, unpack(gates, self.given[4].unsqueeze(-1)).squeeze(-1)]

    def _unpair(self, table: Tensor, grad_above: Tensor, size: int) -> Tensor:
        grad_table = torch.zeros_like(table)
        left, right = pairs_of(grad_table)
        left.copy_(grad_above * self._over_right(size, left.shape[1]))
        right.copy_(grad_above)
        return grad_table

    def _read_backward(
        self,
        size: int,
        level: int,
        table: Tensor,
        grad_table: Tensor,
        grad_y: Tensor,
        grads: list[Tensor],
    ) -> None:
        weights = self.weights[..., level : level + 1]
        grad_weights = grads[3][..., level : level + 1]
        views = zip(
            odd_blocks(self.q, size), odd_blocks(weights, size), odd_blocks(grad_y, size),
            odd_blocks(grads[0], size), odd_blocks(grad_weights, size), self._since_block(size),
            strict=True,
        )  # fmt: skip
        for (even, q), (_, weight), (_, grad), (_, grad_q), (_, grad_weight), decay in views:
            grad = grad.flatten(2, 3)
            carried = torch.matmul(grad, table[:, even].mT).view_as(q).mul_(decay)
            grad_weight += (q * carried).sum(-1, keepdim=True)
            grad_q += carried.mul_(weight)
            weighted = (q * (weight * decay)).flatten(2, 3)
            grad_table[:, even] += torch.matmul(weighted.mT, grad)

    def _chunks_backward(self, grad_y: Tensor, grad_table: Tensor, grads: list[Tensor]) -> None:
        grad_q, grad_k, grad_v, grad_weights = grads
        grad_k.copy_(torch.matmul(self.v, grad_table.mT).mul_(self.until_end))
        grad_v.copy_(torch.matmul(self.k * self.until_end, grad_table))
        for rows, chunks in self.blocks():
            given = (self.q, self.k, self.v, self.weights, grad_y)
            q, k, v, weights, grad = (x[rows, chunks].flatten(0, 1) for x in given)
            inside = self.inside(rows, chunks)
            scores = torch.bmm(q, k.mT).mul_(inside)
            spread = spread_levels(weights, self.levels)
            grad_scores = torch.bmm(grad, v.mT)
            summed = gather_levels(grad_scores * scores, self.levels, weights.shape[-1])
            grad_scores.mul_(spread).mul_(inside)
            found = (
                torch.bmm(grad_scores, k),
                torch.bmm(grad_scores.mT, q),
                torch.bmm(scores.mul_(spread).mT, grad),
                summed,
            )
            for part, total in zip(found, (grad_q, grad_k, grad_v, grad_weights), strict=True):
                total[rows, chunks] += part.view_as(total[rows, chunks])
