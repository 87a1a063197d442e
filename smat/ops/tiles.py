"""One block of the causal branch as tiles of keys and of queries, with the decay inside it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.ops.chunk_scan import ChunkScan, plain_scan
from smat.ops.decay import ChunkDecay, lower_triangle
from smat.ops.pieces import Block


class KeyTiles:
    """A block's keys and values, and the scan over its chunks.

    ``to_end`` are the keys as they arrive at a chunk's end.
    """

    def __init__(self, block: Block, psi: Tensor, v: Tensor, decay: ChunkDecay | None) -> None:
        """Cut a block's psi (N, t, r) and v (N, t, p)."""
        self.block, self.decay, self.num_rows = block, decay, len(psi)
        self.psi, self.v = self.cut(psi), self.cut(v)
        if decay is None:
            self.scan = plain_scan(self.num_rows, block.num_chunks, psi.dtype, psi.device)
            self.to_end = self.psi
            return
        self.scan = ChunkScan(decay.between(block))
        self.until_end = self.cut_gates(decay.until_end)
        self.to_end = self.psi * self.until_end

    def cut_gates(self, x: Tensor) -> Tensor:
        """Take the block's part of (N, T) -> (N chunks, tile, 1), the last value behind the end."""
        x = x[:, self.block.start : self.block.stop]
        if self.block.padded > x.shape[1]:
            x = torch.cat([x, x[:, -1:].expand(-1, self.block.padded - x.shape[1])], 1)
        return x.reshape(-1, self.block.tile, 1)

    def cut(self, x: Tensor) -> Tensor:
        """(N, t, f) -> (N chunks, tile, f), zeros behind the last token."""
        if self.block.padded > x.shape[1]:
            x = F.pad(x, (0, 0, 0, self.block.padded - x.shape[1]))
        return x.reshape(-1, self.block.tile, x.shape[-1])

    def join(self, tiles: Tensor) -> Tensor:
        """(N chunks, tile, f) -> (N, t, f)."""
        block = self.block
        flat = tiles.view(self.num_rows, block.padded, -1)
        return flat[:, : block.stop - block.start]

    def chunk_sums(self) -> Tensor:
        """Sum psi v' over each chunk, (N, chunks, r p)."""
        return torch.bmm(self.to_end.mT, self.v).view(self.num_rows, self.block.num_chunks, -1)


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
        self.from_start = self.phi
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
        keys = self.keys
        parts = (keys.cut_gates(part).squeeze(-1) for part in decay.parts)
        self.inside = lower_triangle(*parts).unsqueeze(1)
        since_start = keys.cut_gates(decay.since_start)
        if self.chunks is not None:
            chunk, token = self.chunks[:, None], self.in_chunk.clamp(min=0)
            by_row = (keys.num_rows, keys.block.num_chunks)
            self.inside = self.inside.unflatten(0, by_row)[:, chunk, 0, token].flatten(0, 1)
            self.inside = self.inside.unsqueeze(1)
            since_start = since_start.unflatten(0, by_row)[:, chunk, token].flatten(0, 1)
        self.since_start = since_start.repeat(1, self.group, 1) if self.group > 1 else since_start
        self.from_start = self.phi * self.since_start

    def cut(self, x: Tensor) -> Tensor:
        """(N, G, R, f) -> (N chunks, G width, f)."""
        if self.chunks is None:
            if self.keys.block.padded > x.shape[2]:
                x = F.pad(x, (0, 0, 0, self.keys.block.padded - x.shape[2]))
            tiles = x.unflatten(2, (self.num_chunks, self.width))
        else:
            tiles = x.new_zeros(*x.shape[:2], self.num_chunks, self.width, x.shape[-1])
            tiles[:, :, self.row, self.place] = x
        return tiles.transpose(1, 2).reshape(-1, self.group * self.width, x.shape[-1])

    def join(self, tiles: Tensor) -> Tensor:
        """(N chunks, G width, f) -> (N, G, R, f)."""
        by_head = tiles.view(-1, self.num_chunks, self.group, self.width, tiles.shape[-1])
        by_head = by_head.transpose(1, 2)
        if self.chunks is None:
            return by_head.flatten(2, 3)[:, :, : self.num_queries]
        return by_head[:, :, self.row, self.place]

    def of_chunks(self, tiles: Tensor) -> Tensor:
        """Take the key tiles of the chunks that hold queries."""
        if self.chunks is None:
            return tiles
        return tiles.unflatten(0, (self.keys.num_rows, -1))[:, self.chunks].flatten(0, 1)

    def to_chunks(self, tiles: Tensor) -> Tensor:
        """Put tiles of the chunks that hold queries among all chunks, zeros elsewhere."""
        if self.chunks is None:
            return tiles
        num_rows, num_chunks = self.keys.num_rows, self.keys.block.num_chunks
        spread = tiles.new_zeros(num_rows, num_chunks, *tiles.shape[1:])
        spread[:, self.chunks] = tiles.unflatten(0, (num_rows, -1))
        return spread.flatten(0, 1)

    def hide_future_(self, scores: Tensor) -> Tensor:
        """Mask score tiles in place: nothing behind the query, decay before it."""
        tiles = scores.view(len(scores), self.group, self.width, -1)
        if self.keys.decay is not None:
            tiles.mul_(self.inside)
        elif self.chunks is None:
            tiles.tril_()
        if self.chunks is not None:
            token = torch.arange(self.keys.block.tile, device=scores.device)
            future = token > self.in_chunk[..., None]  # (chunks, width, tile); padding sees nothing
            tiles.unflatten(0, (-1, self.num_chunks)).masked_fill_(future[None, :, None], 0.0)
        return scores
