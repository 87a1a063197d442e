"""Log-linear attention with delta-rule transitions over a tree of chunks, forward and backward.

A block's summary is a pair [S | M]: what the block writes, and the product of its transitions.
A query arrives at height b transported to its block's beginning; reading [S | M] of the block to
the left gives its output at this level and, in the same product, its transport one block further.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
from smat.ops.wy import TILES_PER_BLOCK, WYTiles, compute_dtype


class DeltaTree:
    """One call's inputs as rows of chunks (B H, chunks, c, f)."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        level_weights: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        scale: float,
        chunk_size: int,
    ) -> None:
        dtype = compute_dtype(q, k, v, level_weights)
        self.given = (q, k, v, level_weights, log_decay.unsqueeze(-1), beta.unsqueeze(-1))
        self.scale, self.chunk_size = scale, chunk_size
        packed = (pack(x, chunk_size, dtype) for x in self.given)
        self.q, self.k, self.v, self.weights, self.gates, self.beta = packed
        self.q = self.q * scale
        self.num_chunks, self.value_dim = self.q.shape[1], v.shape[-1]
        self.levels = level_table(chunk_size, level_weights.shape[-1], self.q)

    def heights(self) -> list[tuple[int, int]]:
        return list(heights(self.num_chunks, self.chunk_size, self.weights.shape[-1]))

    def blocks(self) -> list[slice]:
        num_tiles = len(self.q) * self.num_chunks
        return [slice(i, i + TILES_PER_BLOCK) for i in range(0, num_tiles, TILES_PER_BLOCK)]

    def tiles(self, block: slice) -> WYTiles:
        given = (self.q, self.k, self.beta, self.gates)
        return WYTiles(*(x.flatten(0, 1)[block] for x in given))

    def _chunks_forward(self, y: Tensor | None) -> tuple[Tensor, Tensor]:
        """Add what chunks read of themselves to y; return chunk summaries and local queries."""
        key_dim = self.k.shape[-1]
        table = self.k.new_empty(*self.k.shape[:2], key_dim, self.value_dim + key_dim)
        queries = torch.empty_like(self.q)
        for block in self.blocks():
            tiles = self.tiles(block)
            writes = self.v.flatten(0, 1)[block] * tiles.beta
            if y is not None:
                spread = spread_levels(self.weights.flatten(0, 1)[block], self.levels)
                spread.mul_(torch.bmm(tiles.reads, tiles.inverse))
                y.flatten(0, 1)[block] = torch.bmm(spread, writes)
            update = torch.bmm(tiles.inverse, writes)
            summary = torch.cat([torch.bmm(tiles.key_out.mT, update), tiles.transition()], -1)
            table.flatten(0, 1)[block] = summary
            local = torch.baddbmm(tiles.query_in, tiles.reads, tiles.erase, alpha=-1)
            queries.flatten(0, 1)[block] = local
        return table, queries

    def _pair_up(self, table: Tensor) -> Tensor:
        left, right = pairs_of(table)
        joined = torch.matmul(right[..., self.value_dim :], left)
        joined[..., : self.value_dim] += right[..., : self.value_dim]
        return joined

    def forward(self) -> Tensor:
        y = torch.empty_like(self.v)
        table, queries = self._chunks_forward(y)
        for size, level in self.heights():
            weights = self.weights[..., level : level + 1]
            views = zip(
                odd_blocks(queries, size), odd_blocks(weights, size), odd_blocks(y, size),
                strict=True,
            )  # fmt: skip
            for (even, query), (_, weight), (_, target) in views:
                read = torch.matmul(query.flatten(2, 3), table[:, even])
                read = read.view(*query.shape[:4], -1)
                target.addcmul_(read[..., : self.value_dim], weight)
                query.copy_(read[..., self.value_dim :])
            if 2 * size < self.num_chunks:
                table = self._pair_up(table)
        return unpack(y, self.given[2])

    def backward(self, grad_out: Tensor) -> list[Tensor]:
        grad_y = pack(grad_out, self.chunk_size, self.q.dtype)
        table, queries = self._chunks_forward(None)
        climbed: list[tuple[int, int, Tensor, list[Tensor]]] = []
        for size, level in self.heights():
            kept = []
            for even, query in odd_blocks(queries, size):
                kept.append(query.flatten(2, 3).clone())
                read = torch.matmul(kept[-1], table[:, even, :, self.value_dim :])
                query.copy_(read.view_as(query))
            climbed.append((size, level, table, kept))
            if 2 * size < self.num_chunks:
                table = self._pair_up(table)
        grad_queries = queries.zero_()  # nothing reads a query that has been carried all the way
        grad_weights = torch.zeros_like(self.weights)
        grad_table = torch.zeros_like(table)
        for size, level, table, kept in reversed(climbed):
            if table.shape != grad_table.shape:
                grad_table = self._unpair(table, grad_table)
            grad_weight = grad_weights[..., level : level + 1]
            reads = (size, level, table, kept)
            self._read_backward(reads, grad_table, grad_y, grad_queries, grad_weight)
        return self._chunks_backward(grad_y, grad_queries, grad_table, grad_weights)

    def _unpair(self, table: Tensor, grad_above: Tensor) -> Tensor:
        grad_table = torch.zeros_like(table)
        grad_left, grad_right = pairs_of(grad_table)
        left, right = pairs_of(table)
        grad_left.copy_(torch.matmul(right[..., self.value_dim :].mT, grad_above))
        grad_right[..., : self.value_dim] = grad_above[..., : self.value_dim]
        grad_right[..., self.value_dim :] = torch.matmul(grad_above, left.mT)
        return grad_table

    def _read_backward(
        self,
        reads: tuple[int, int, Tensor, list[Tensor]],
        grad_table: Tensor,
        grad_y: Tensor,
        grad_queries: Tensor,
        grad_weights: Tensor,
    ) -> None:
        size, level, table, kept = reads
        weights = self.weights[..., level : level + 1]
        views = zip(
            kept, odd_blocks(weights, size), odd_blocks(grad_y, size),
            odd_blocks(grad_queries, size), odd_blocks(grad_weights, size), strict=True,
        )  # fmt: skip
        for query, (even, weight), (_, grad), (_, grad_query), (_, grad_weight) in views:
            write = table[:, even, :, : self.value_dim]
            seen = torch.matmul(query, write).view_as(grad)
            grad_weight += (seen * grad).sum(-1, keepdim=True)
            grad_read = torch.cat([grad * weight, grad_query], -1).flatten(2, 3)
            grad_table[:, even] += torch.matmul(query.mT, grad_read)
            grad_query.copy_(torch.matmul(grad_read, table[:, even].mT).view_as(grad_query))

    def _chunks_backward(
        self, grad_y: Tensor, grad_queries: Tensor, grad_table: Tensor, grad_weights: Tensor
    ) -> list[Tensor]:
        given = (self.q, self.k, self.v, self.gates, self.beta)
        grads = [torch.empty_like(x) for x in given]
        for block in self.blocks():
            incoming = [x.flatten(0, 1)[block] for x in (grad_y, grad_queries, grad_table)]
            *found, grad_level = self._tile_backward(block, *incoming)
            for part, total in zip(found, grads, strict=True):
                total.flatten(0, 1)[block] = part
            grad_weights.flatten(0, 1)[block] += grad_level
        grad_q, grad_k, grad_v, grad_gates, grad_beta = grads
        ordered = (grad_q.mul_(self.scale), grad_k, grad_v, grad_weights, grad_gates, grad_beta)
        found = [unpack(x, like) for x, like in zip(ordered, self.given, strict=True)]
        return [*found[:4], found[4].squeeze(-1), found[5].squeeze(-1)]

    def _tile_backward(
        self, block: slice, grad_y: Tensor, grad_query: Tensor, grad_summary: Tensor
    ) -> tuple[Tensor, ...]:
        tiles = self.tiles(block)
        v = self.v.flatten(0, 1)[block]
        weights = self.weights.flatten(0, 1)[block]
        writes = v * tiles.beta
        update = torch.bmm(tiles.inverse, writes)
        grad_write = grad_summary[..., : self.value_dim]
        grad_transition = grad_summary[..., self.value_dim :]
        # y = (C o levels) diag(beta) V with C = reads (I + L)^-1
        inner = torch.bmm(tiles.reads, tiles.inverse)
        spread = spread_levels(weights, self.levels)
        grad_inner = torch.bmm(grad_y, writes.mT)
        grad_levels = gather_levels(grad_inner * inner, self.levels, weights.shape[-1])
        grad_inner.mul_(spread)
        grad_writes = torch.bmm(spread.mul_(inner).mT, grad_y)
        # Through the inverse: grad L = -(I + L)^-T grad (I + L)^-T, one term for each of its uses.
        through_update = torch.bmm(tiles.inverse.mT, torch.bmm(tiles.key_out, grad_write))
        grad_erase = torch.bmm(tiles.reads.mT, grad_query)
        grad_erase.baddbmm_(tiles.key_out, grad_transition).neg_()
        through_erase = torch.bmm(tiles.inverse.mT, grad_erase)
        through_inner = torch.bmm(grad_inner, tiles.inverse.mT)
        grad_lower = torch.bmm(inner.mT, through_inner)
        grad_lower.baddbmm_(through_update, update.mT).baddbmm_(through_erase, tiles.erase.mT)
        grad_writes += through_update
        grad_key_out = torch.bmm(update, grad_write.mT)
        end = torch.bmm(tiles.key_out.mT, update).mul_(grad_write).sum((1, 2))
        grad_q, grad_k, grad_beta, grad_gate = tiles.backward(
            grad_reads=through_inner.baddbmm(grad_query, tiles.erase.mT, alpha=-1),
            grad_lower=grad_lower.neg_(),
            grad_query_in=grad_query.clone(),
            grad_key_in=tiles.beta * through_erase,
            grad_key_out=grad_key_out.baddbmm_(tiles.erase, grad_transition.mT, alpha=-1),
            grad_end=end + (tiles.transition() * grad_transition).sum((1, 2)),
        )
        grad_beta += (through_erase * tiles.key_in).sum(-1, keepdim=True)
        grad_beta += (grad_writes * v).sum(-1, keepdim=True)
        return grad_q, grad_k, grad_writes.mul_(tiles.beta), grad_gate, grad_beta, grad_levels
