"""A sequence cut into chunks, and some of them as tiles with their decay (equation 8).

Tiles of several chunks are worked off by one set of batched products. Heads of queries or of values
may share a key: N rows of keys, G heads of queries or M heads of values to each, C chunks of t
tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smat.masks import Segment
from smat.ops.linear.decay import ChunkDecay, LogDecay

CHUNK = 64  # tokens: tiles of 64 x 64 reach most of the GEMM rate at the fewest operations
MAX_CHUNKS = 32  # worked off together: the scan over them costs their square
CPU_TILES, OTHER_TILES = 128, 1 << 12  # of chunks that are worked off together


class Chunks(NamedTuple):
    """Consecutive chunks of one size, whose queries share a boundary."""

    start: int
    stop: int
    size: int
    boundary: int


def cut_chunks(segments: Sequence[Segment], at_most: int = MAX_CHUNKS) -> list[Chunks]:
    """Cut a sequence into chunks, at every segment and where every window begins.

    >>> [chunks[:3] for chunks in cut_chunks([Segment(0, 100, 0), Segment(100, 130, 100)])]
    [(0, 64, 64), (64, 100, 36), (100, 130, 30)]
    """
    edges = sorted({edge for segment in segments for edge in segment})
    cut = []
    for segment in segments:
        inside = [edge for edge in edges if segment.start <= edge <= segment.stop]
        for start, stop in itertools.pairwise(inside):
            whole, step = start + (stop - start) // CHUNK * CHUNK, CHUNK * at_most
            for at in range(start, whole, step):
                cut.append(Chunks(at, min(at + step, whole), CHUNK, segment.boundary))
            if whole < stop:
                cut.append(Chunks(whole, stop, stop - whole, segment.boundary))
    return cut


class Tiles:
    """Keys and values of some chunks as tiles, their decay, and the scan over the chunks."""

    def __init__(self, chunks: Chunks, psi: Tensor, v: Tensor, decay: LogDecay | None) -> None:
        """Take the chunks' part of psi (N, T, r) and v (N, M, T, p)."""
        self.chunks = chunks
        self.psi = _cut(psi.unsqueeze(1), chunks)  # (N, 1, C, t, r)
        self.v = self.v_at_end = _cut(v, chunks)  # (N, M, C, t, p)
        self.decay = None if decay is None else ChunkDecay.of(decay, *chunks[:3], v.dtype)
        if self.decay is None:
            num_edges = self.v.shape[2] + 1
            ones = v.new_ones(num_edges, num_edges).tril_()
            self.between = ones.expand(v.shape[0] * v.shape[1], -1, -1)
        else:
            self.between = self.decay.between.flatten(0, 1)
            self.v_at_end = self.v * self.decay.until_end

    def chunk_sums(self) -> Tensor:
        """Sum psi v' over each chunk, (N, M, C, r, p)."""
        return torch.matmul(self.psi.mT, self.v_at_end)

    def states_before(self, sums: Tensor, state: Tensor) -> Tensor:
        """Scan behind a state (N, M, r, p): what is known before each chunk, (N, M, C, r, p)."""
        first = self.between[:, :-1, :1] * _flat(state, 1)
        return first.baddbmm_(self.between[:, :-1, 1:], _flat(sums, -1)).view_as(sums)

    def state_behind(self, sums: Tensor, state: Tensor) -> Tensor:
        """Carry a state (N, M, r, p) over the chunks."""
        first = self.between[:, -1:, :1] * _flat(state, 1)
        return first.baddbmm_(self.between[:, -1:, 1:], _flat(sums, -1)).view_as(state)

    def scan_backward(
        self, grad_before: Tensor | None, grad_behind: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Find the gradients of the chunk sums, (N, M, C, r, p), and of the state before them."""
        grad_sums = self.between[:, -1:, 1:].mT * _flat(grad_behind, 1)
        grad_state = self.between[:, -1:, :1] * _flat(grad_behind, 1)
        if grad_before is not None:
            grad_sums.baddbmm_(self.between[:, :-1, 1:].mT, _flat(grad_before, -1))
            grad_state.baddbmm_(self.between[:, :-1, :1].mT, _flat(grad_before, -1))
        shape = (*grad_behind.shape[:2], -1, *grad_behind.shape[2:])
        return grad_sums.view(shape), grad_state.view_as(grad_behind)

    def scores(self, phi: Tensor) -> Tensor:
        """Weigh keys against the queries of their chunk: (N, M or 1, C, G t, t)."""
        return self.weigh_(torch.matmul(phi, self.psi.mT))

    def weigh_(self, scores: Tensor) -> Tensor:
        """Multiply tiles by what is left of each key, 0 for later ones; may work in place."""
        by_head = scores.unflatten(3, (-1, scores.shape[-1]))  # (N, ., C, G, t, t)
        if self.decay is not None:
            return (by_head * self.decay.inside.unsqueeze(3)).flatten(3, 4)
        by_head.tril_()
        return scores

    def since_start(self, x: Tensor) -> Tensor:
        """Multiply (N, M, C, G t, .) by what is left of the state before the chunk."""
        if self.decay is None:
            return x
        by_head = x.unflatten(3, (-1, self.psi.shape[3]))
        return (by_head * self.decay.since_start.unsqueeze(3)).flatten(3, 4)


def add_product_(onto: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add products of tiles, (N, M, C, a, b) (N, M, C, b, c), to contiguous (N, M, C, a, c)."""
    tiles = (x.expand(*onto.shape[:3], -1, -1).reshape(-1, *x.shape[3:]) for x in (left, right))
    onto.view(-1, *onto.shape[3:]).baddbmm_(*tiles)
    return onto


def _flat(states: Tensor, num: int) -> Tensor:
    """Lay states out as rows: (N, M, r, p) or (N, M, C, r, p) -> (N M, 1 or C, r p)."""
    width = states.shape[-2] * states.shape[-1]
    return states.reshape(states.shape[0] * states.shape[1], num, width)


def _cut(x: Tensor, chunks: Chunks) -> Tensor:
    """(N, M, T, f) -> (N, M, C, t, f)."""
    return x[:, :, chunks.start : chunks.stop].unflatten(2, (-1, chunks.size)).contiguous()


def cut_queries(x: Tensor, chunks: Chunks, group: int | None = None) -> Tensor:
    """Put G heads that share a key side by side: (N, G M, T, f) -> (N, M, C, G t, f).

    Queries have M = 1; of answers, G is to be said.
    """
    by_chunk = _cut(x, chunks)
    if (group or x.shape[1]) == 1:
        return by_chunk
    return by_chunk.transpose(1, 2).flatten(2, 3).unsqueeze(1)


def join_queries(x: Tensor, group: int) -> Tensor:
    """(N, M, C, G t, f) -> (N, G M, C t, f)."""
    if group == 1:
        return x.flatten(2, 3)
    return x.squeeze(1).unflatten(2, (group, -1)).transpose(1, 2).flatten(2, 3)


def sum_heads(x: Tensor) -> Tensor:
    """Sum over the heads of values, (N, M, ...) -> (N, 1, ...), without a copy if there is one."""
    return x.sum(1, keepdim=True) if x.shape[1] > 1 else x


def max_chunks(v: Tensor) -> int:
    """Choose how many chunks to work off at once, of N M states."""
    tiles = CPU_TILES if v.device.type == "cpu" else OTHER_TILES
    return max(1, min(MAX_CHUNKS, tiles // max(1, v.shape[0] * v.shape[1])))
