"""One block of the causal branch as tiles of keys and of queries, with the decay inside it.

Several heads of values may share their keys and queries, as those of a group of Mamba-2 do: the
products of features are then made once. So it is values and answers that carry decay, not features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.ops.chunk_scan import ChunkScan, plain_scan
from smat.ops.decay import ChunkDecay, lower_triangle
from smat.ops.pieces import Block


class KeyTiles:
    """A block's keys and values, and the scan over its chunks.

    M heads of values share each row of keys. ``to_end`` are the values as a chunk's end sees them.
    """

    def __init__(self, block: Block, psi: Tensor, v: Tensor, decay: ChunkDecay | None) -> None:
        """Cut a block's psi (N, t, r) and v (M, N, t, p)."""
        self.block, self.decay = block, decay
        self.num_rows, self.num_heads = len(psi), len(v)
        self.psi, self.v = self.cut(psi), self.cut(v)
        if decay is None:
            num_states = self.num_heads * self.num_rows
            self.scan = plain_scan(num_states, block.num_chunks, psi.dtype, psi.device)
            self.to_end = self.v
            return
        self.scan = ChunkScan(decay.between(block))
        self.until_end = self.cut_gates(decay.until_end)
        self.to_end = self.v * self.until_end

    def cut_gates(self, x: Tensor) -> Tensor:
        """Cut the block's part of (M N, T) -> (M, N chunks, tile, 1), the last value at the end."""
        x = x[:, self.block.start : self.block.stop]
        if self.block.padded > x.shape[1]:
            x = torch.cat([x, x[:, -1:].expand(-1, self.block.padded - x.shape[1])], 1)
        return x.reshape(self.num_heads, -1, self.block.tile, 1)

    def cut(self, x: Tensor) -> Tensor:
        """(..., N, t, f) -> (..., N chunks, tile, f), zeros behind the last token."""
        if self.block.padded > x.shape[-2]:
            x = F.pad(x, (0, 0, 0, self.block.padded - x.shape[-2]))
        num_tiles = self.num_rows * self.block.num_chunks
        return x.reshape(*x.shape[:-3], num_tiles, self.block.tile, x.shape[-1])

    def join(self, tiles: Tensor) -> Tensor:
        """(..., N chunks, tile, f) -> (..., N, t, f)."""
        by_row = tiles.reshape(*tiles.shape[:-3], self.num_rows, -1, tiles.shape[-1])
        return by_row[..., : self.block.stop - self.block.start, :]

    def chunk_sums(self) -> Tensor:
        """Sum psi v' over each chunk, (M N, chunks, r p)."""
        sums = bmm_heads(self.psi.mT, self.to_end)
        return sums.view(self.num_heads * self.num_rows, self.block.num_chunks, -1)


class QueryTiles:
    """A block's queries beside its key tiles: all of its tokens, or those at given positions.

    Heads that share keys share a tile, (N chunks, G tile, .). At positions, only chunks that hold a
    query are kept, each padded to the largest number of queries in a chunk.
    """

    def __init__(self, keys: KeyTiles, phi: Tensor, positions: Tensor | None) -> None:
        """Cut phi (N, G, R, r) of a block's tokens, or of those at given positions."""
        self.keys, self.group, self.num_queries = keys, phi.shape[1], phi.shape[2]
        self.chunks: Tensor | None = None
        block = keys.block
        self.num_chunks, self.width = block.num_chunks, block.tile
        if positions is not None:
            self._place(positions - block.start)
        self.phi = self.cut(phi)
        if keys.decay is not None:
            self._find_decay(keys.decay)

    def _place(self, offset: Tensor) -> None:
        """Find the chunk of every query, and its place among that chunk's queries."""
        tile = self.keys.block.tile
        self.chunks, self.row = (offset // tile).unique_consecutive(return_inverse=True)
        _, counts = self.row.unique_consecutive(return_counts=True)
        self.place = torch.arange(len(offset), device=offset.device)
        self.place -= (counts.cumsum(0) - counts)[self.row]
        self.num_chunks, self.width = len(self.chunks), int(counts.max())
        self.in_chunk = offset.new_full((self.num_chunks, self.width), -1)
        self.in_chunk[self.row, self.place] = offset % tile

    def _find_decay(self, decay: ChunkDecay) -> None:
        """Find what is left within chunks, (M, N chunks, 1, width, tile), and since their start."""
        keys = self.keys
        parts = (keys.cut_gates(part).squeeze(-1) for part in decay.parts)
        inside = lower_triangle(*parts)
        since_start = keys.cut_gates(decay.since_start)
        if self.chunks is not None:
            chunk, token = self.chunks[:, None], self.in_chunk.clamp(min=0)
            by_row = (keys.num_rows, keys.block.num_chunks)
            inside = inside.unflatten(1, by_row)[:, :, chunk, token].flatten(1, 2)
            since_start = since_start.unflatten(1, by_row)[:, :, chunk, token].flatten(1, 2)
        self.inside = inside.unsqueeze(2)
        several = self.group > 1
        self.since_start = since_start.repeat(1, 1, self.group, 1) if several else since_start

    def cut(self, x: Tensor) -> Tensor:
        """(..., N, G, R, f) -> (..., N chunks, G width, f)."""
        if self.chunks is None:
            if self.keys.block.padded > x.shape[-2]:
                x = F.pad(x, (0, 0, 0, self.keys.block.padded - x.shape[-2]))
            if self.group == 1:
                num_tiles = self.keys.num_rows * self.num_chunks
                return x.reshape(*x.shape[:-4], num_tiles, self.width, x.shape[-1])
            tiles = x.unflatten(-2, (self.num_chunks, self.width))
        else:
            tiles = x.new_zeros(*x.shape[:-2], self.num_chunks, self.width, x.shape[-1])
            tiles[..., self.row, self.place, :] = x
        return tiles.transpose(-4, -3).flatten(-3, -2).flatten(-4, -3)

    def join(self, tiles: Tensor) -> Tensor:
        """(..., N chunks, G width, f) -> (..., N, G, R, f)."""
        if self.chunks is None and self.group == 1:
            by_row = tiles.reshape(*tiles.shape[:-3], self.keys.num_rows, 1, -1, tiles.shape[-1])
            return by_row[..., : self.num_queries, :]
        by_chunk = tiles.unflatten(-3, (self.keys.num_rows, -1))
        by_head = by_chunk.unflatten(-2, (self.group, -1)).transpose(-4, -3)
        if self.chunks is None:
            return by_head.flatten(-3, -2)[..., : self.num_queries, :]
        return by_head[..., self.row, self.place, :]

    def of_chunks(self, tiles: Tensor) -> Tensor:
        """Take the key tiles (..., N chunks, a, b) of the chunks that hold queries."""
        if self.chunks is None:
            return tiles
        by_row = tiles.unflatten(-3, (self.keys.num_rows, -1))
        return by_row[..., self.chunks, :, :].flatten(-4, -3)

    def to_chunks(self, tiles: Tensor) -> Tensor:
        """Put tiles of the chunks that hold queries among all chunks, zeros elsewhere."""
        if self.chunks is None:
            return tiles
        by_row = tiles.unflatten(-3, (self.keys.num_rows, -1))
        shape = list(by_row.shape)
        shape[-3] = self.keys.block.num_chunks
        spread = tiles.new_zeros(shape)
        spread[..., self.chunks, :, :] = by_row
        return spread.flatten(-4, -3)

    def weigh(self, scores: Tensor) -> Tensor:
        """Give score tiles (N chunks, G width, tile) every head's decay: (M, ...), or (1, ...)."""
        if self.keys.decay is None or self.keys.num_heads == 1:
            return self.weigh_(scores.unsqueeze(0))
        by_query = scores.unflatten(1, (self.group, -1))
        return self._hide_future_((self.inside * by_query).flatten(2, 3))

    def weigh_(self, scores: Tensor) -> Tensor:
        """Mask score tiles (M, N chunks, G width, tile) in place: decay, nothing of the future."""
        if self.keys.decay is not None:
            scores.unflatten(2, (self.group, -1)).mul_(self.inside)
        elif self.chunks is None:
            scores.unflatten(2, (self.group, -1)).tril_()
        return self._hide_future_(scores)

    def _hide_future_(self, scores: Tensor) -> Tensor:
        """Where there are queries at some positions only: padding among them sees nothing."""
        if self.chunks is not None:
            token = torch.arange(self.keys.block.tile, device=scores.device)
            future = token > self.in_chunk[..., None]  # (chunks, width, tile)
            tiles = scores.unflatten(1, (-1, self.num_chunks)).unflatten(-2, (self.group, -1))
            tiles.masked_fill_(future[:, None], 0.0)
        return scores


def bmm_heads(left: Tensor, right: Tensor) -> Tensor:
    """Multiply tiles of M heads, (M, n, b, c), by tiles (M, n, a, b), or by shared ones, (n, a, b).

    Neither side is copied, however heads lie in memory.
    """
    num_heads = right.shape[0]
    if num_heads == 1:
        return torch.bmm(left.view(left.shape[-3:]), right[0]).unsqueeze(0)
    lefts = left.expand(num_heads, *left.shape[-3:])
    products = right.new_empty(*lefts.shape[:-1], right.shape[-1])
    for head in range(num_heads):
        torch.bmm(lefts[head], right[head], out=products[head])
    return products


def sum_heads(x: Tensor) -> Tensor:
    """Sum over M heads, (M, ...) -> (...), without a copy if there is one."""
    return x.sum(0) if x.shape[0] > 1 else x[0]


def add_bmm_heads_(onto: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add the products of M heads' tiles to (M, n, a, c), or all of them to one (n, a, c)."""
    num_heads = right.shape[0]
    if num_heads == 1:
        onto.view(onto.shape[-3:]).baddbmm_(left.view(left.shape[-3:]), right[0])
        return onto
    lefts, totals = (x.expand(num_heads, *x.shape[-3:]) for x in (left, onto))
    for head in range(num_heads):
        totals[head].baddbmm_(lefts[head], right[head])
    return onto
