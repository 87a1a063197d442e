"""The causal branch: chunk summaries, an exclusive scan, dense tiles (equation 8, adjoint 12).

Within a recent window,

    y_i = phi_i . S_in[b] + sum over j <= i of the chunk of (phi_i . psi_j) v_j,
    S_in[b] = sum over the window's earlier chunks of D_a,   D_a = sum over j in a of psi_j v_j',

and with gates every term carries exp(lambda_i - lambda_j), taken apart at the chunk's edges. Heads
of values that share their keys and queries, with gates of their own, share phi_i . psi_j too.

The scan over the chunks of a block is a few products, so gated and ungated run the same code and no
loop over chunks is left. One block of tiles is alive at a time: features are made for it, used
while they are in cache, and dropped. The backward pass finds the states before all chunks again,
from the keys alone, and then goes through the blocks in reverse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from smat.ops.decay import ChunkDecay, LogDecay
from smat.ops.pieces import Block
from smat.ops.tiles import KeyTiles, QueryTiles, add_bmm_heads_, bmm_heads, sum_heads


class Source(Protocol):
    """Where features come from: N rows of keys, each with G heads of queries and M of values."""

    def phi(self, taken: slice, boundary: int) -> Tensor:
        """Return the features of some queries with one boundary, (N, G, R, r)."""

    def psi(self, span: slice) -> Tensor:
        """Return the features of some keys, (N, t, r)."""

    def v(self, span: slice) -> Tensor:
        """Return the values of some keys, (M, N, t, p)."""

    def grad_y(self, taken: slice, boundary: int) -> Tensor:
        """Return the gradient of their outputs, (M, N, G, R, p)."""

    def zero_state(self) -> Tensor:
        """Return the state of nothing, (M N, r, p)."""


@dataclass(frozen=True)
class Arrays:
    """A source that has everything in memory, (N, G, R, r), (N, t, r) and (N, t, p)."""

    all_phi: Tensor
    all_psi: Tensor
    all_v: Tensor
    all_grad_y: Tensor | None = None

    def phi(self, taken: slice, boundary: int) -> Tensor:
        """Return the features of some queries, (N, G, R, r)."""
        return self.all_phi[:, :, taken]

    def psi(self, span: slice) -> Tensor:
        """Return the features of some keys, (N, t, r)."""
        return self.all_psi[:, span]

    def v(self, span: slice) -> Tensor:
        """Return the values of some keys, (1, N, t, p)."""
        return self.all_v[None, :, span]

    def grad_y(self, taken: slice, boundary: int) -> Tensor:
        """Return the gradient of some outputs, (1, N, G, R, p)."""
        assert self.all_grad_y is not None
        return self.all_grad_y[None, :, :, taken]

    def zero_state(self) -> Tensor:
        """Return the state of nothing, (N, r, p)."""
        psi, v = self.all_psi, self.all_v
        return psi.new_zeros(len(psi), psi.shape[-1], v.shape[-1])


class BlockGrads(NamedTuple):
    """The gradients of one block: of its queries (if it has any), its keys and its values.

    And what they are gradients of, which was made for them.
    """

    block: Block
    taken: slice
    phi: Tensor | None
    psi: Tensor
    v: Tensor
    phi_value: Tensor | None
    psi_value: Tensor
    v_value: Tensor


@dataclass(frozen=True)
class CausalBranch:
    """The causal branch of some rows, worked off block by block."""

    source: Source
    decay: LogDecay | None
    blocks: Sequence[Block]
    positions: Tensor | None = None  # sorted
    initial: Tensor | None = None  # of a window that began before the first token, at boundary -1

    def forward(self) -> Iterator[tuple[Block, slice, Tensor]]:
        """Yield y (M, N, G, R, p) of the queries in each block that has any."""
        walk = _Walk(self.source.zero_state(), self.initial)
        for block, taken in zip(self.blocks, self.taken(), strict=True):
            if taken.stop > taken.start:
                yield block, taken, self._answer(walk, block, taken)
            else:
                walk.over(self._keys(block), asks=False)

    def _answer(self, walk: _Walk, block: Block, taken: slice) -> Tensor:
        keys = self._keys(block)
        before = walk.over(keys, asks=True)
        assert before is not None
        queries = self._queries(keys, taken)
        y = bmm_heads(queries.phi, queries.of_chunks(before))
        del before  # what a tile needs next stays in cache only if this memory is used again
        if keys.decay is not None:
            y *= queries.since_start
        scores = torch.bmm(queries.phi, queries.of_chunks(keys.psi).mT)
        add_bmm_heads_(y, queries.weigh(scores), queries.of_chunks(keys.v))
        return queries.join(y)

    def backward(self) -> Iterator[BlockGrads]:
        """Yield the gradients of each block, last block first."""
        walk = _Walk(self.source.zero_state(), self.initial)
        work = [
            (block, taken, walk.over(self._keys(block), asks=taken.stop > taken.start))
            for block, taken in zip(self.blocks, self.taken(), strict=True)
        ]
        way_back = _WayBack(self.source.zero_state())
        while work:
            yield self._block_backward(way_back, *work.pop())

    def _block_backward(
        self, way_back: _WayBack, block: Block, taken: slice, before: Tensor | None
    ) -> BlockGrads:
        keys = self._keys(block)
        asked = grad_before = None
        if before is not None:
            grad_y = self.source.grad_y(taken, block.boundary)
            asked = _Asked(self._queries(keys, taken), before, grad_y)
            grad_before = asked.grad_before()
        return _block_grads(keys, taken, asked, way_back.over(keys, grad_before))

    @cached_property
    def chunk_decay(self) -> ChunkDecay | None:
        """The decay within chunks, for all blocks."""
        if self.decay is None:
            return None
        return ChunkDecay(self.decay, self.blocks, self.source.zero_state().dtype)

    def _keys(self, block: Block) -> KeyTiles:
        span = slice(block.start, block.stop)
        return KeyTiles(block, self.source.psi(span), self.source.v(span), self.chunk_decay)

    def _queries(self, keys: KeyTiles, taken: slice) -> QueryTiles:
        positions = None if self.positions is None else self.positions[taken]
        return QueryTiles(keys, self.source.phi(taken, keys.block.boundary), positions)

    def taken(self) -> list[slice]:
        """Find which queries fall into each block."""
        if self.positions is None:
            return [slice(block.start, block.stop) for block in self.blocks]
        edges = [block.start for block in self.blocks] + [self.blocks[-1].stop]
        where = torch.tensor(edges, device=self.positions.device)
        cuts = torch.searchsorted(self.positions, where).tolist()
        return [slice(first, last) for first, last in itertools.pairwise(cuts)]


class _Asked:
    """The queries of a block, and what comes back from their answers."""

    def __init__(self, queries: QueryTiles, before: Tensor, grad_y: Tensor) -> None:
        self.queries, self.before, self.grad_y = queries, before, queries.cut(grad_y)
        decay = queries.keys.decay
        self.at_start = self.grad_y if decay is None else self.grad_y * queries.since_start

    def grad_before(self) -> Tensor:
        """Find the gradient of the states before all chunks, (M, N C, r, p)."""
        return self.queries.to_chunks(bmm_heads(self.queries.phi.mT, self.at_start))

    def grads(self, grad_v: Tensor) -> tuple[Tensor, Tensor]:
        """Find the gradient of phi, and what the dense tiles give to psi and, added on, to v."""
        queries, keys = self.queries, self.queries.keys
        psi, v = queries.of_chunks(keys.psi), queries.of_chunks(keys.v)
        grad_scores = sum_heads(queries.weigh_(bmm_heads(self.grad_y, v.mT)))
        grad_phi = torch.bmm(grad_scores, psi)
        add_bmm_heads_(grad_phi, self.at_start, queries.of_chunks(self.before).mT)
        scores = queries.weigh(torch.bmm(queries.phi, psi.mT))
        if queries.chunks is None:
            add_bmm_heads_(grad_v, scores.mT, self.grad_y)
        else:
            grad_v += queries.to_chunks(bmm_heads(scores.mT, self.grad_y))
        return grad_phi, queries.to_chunks(torch.bmm(grad_scores.mT, queries.phi))


def _block_grads(
    keys: KeyTiles, taken: slice, asked: _Asked | None, grad_chunk: Tensor
) -> BlockGrads:
    """Add the gradients of the chunk sums psi v', (M, N C, r, p), to those of the tiles."""
    grad_v = bmm_heads(keys.psi, grad_chunk)
    if keys.decay is not None:
        grad_v *= keys.until_end
    grad_phi = phi = None
    if asked is None:
        grad_psi = torch.zeros_like(keys.psi)
    else:
        queries = asked.queries
        grad_phi, grad_psi = asked.grads(grad_v)
        grad_phi, phi = queries.join(grad_phi), queries.join(queries.phi)
    add_bmm_heads_(grad_psi, keys.to_end, grad_chunk.mT)
    grad_psi, grad_v, psi, v = (keys.join(x) for x in (grad_psi, grad_v, keys.psi, keys.v))
    return BlockGrads(keys.block, taken, grad_phi, grad_psi, grad_v, phi, psi, v)


class _Walk:
    """States on their way through the blocks: of the current window, and of those that follow.

    Later segments may look through windows that begin in the middle of earlier ones.
    """

    def __init__(self, zero: Tensor, initial: Tensor | None) -> None:
        self.zero = self.carry = zero
        self.windows: dict[int, Tensor] = {} if initial is None else {-1: initial}

    def over(self, keys: KeyTiles, asks: bool) -> Tensor | None:
        """Go over a block; return the states before its chunks, (M, N C, r, p), if asked."""
        self._enter(keys.block)
        scan, sums = keys.scan, keys.chunk_sums()
        grown = scan.grow(sums)
        before = scan.before(sums, grown, self.carry) if asks else None
        self.carry = scan.advance(grown, self.carry)
        self.windows = {edge: scan.advance(grown, x) for edge, x in self.windows.items()}
        return None if before is None else before.view(keys.num_heads, -1, *self.zero.shape[1:])

    def _enter(self, block: Block) -> None:
        """Open a window that begins here, and take up that of the block's queries."""
        if block.opens_window:
            self.windows[block.start] = self.zero
        if not block.begins_segment:
            return
        if block.boundary == block.start:
            self.carry = self.zero
            return
        self.carry = self.windows.pop(block.boundary)
        self.windows = {edge: x for edge, x in self.windows.items() if edge > block.boundary}


class _WayBack:
    """Gradients of states on their way back, from the last block to the first."""

    def __init__(self, zero: Tensor) -> None:
        self.zero = self.carry = zero
        self.windows: dict[int, Tensor] = {}

    def over(self, keys: KeyTiles, grad_before: Tensor | None) -> Tensor:
        """Go over a block; return the gradient of its chunk sums, (M, N C, r, p).

        ``grad_before`` (M, N C, r, p) is that of the states before its chunks, if it has queries.
        """
        block, scan, state = keys.block, keys.scan, self.zero.shape[1:]
        if block.ends_segment:
            self.carry = self.zero
        # What arrives behind the block goes to its sums at once, and on to where it came from.
        arriving = torch.stack([self.carry, *self.windows.values()]).sum(0)
        if grad_before is not None:
            grad_before = grad_before.view(-1, *state)
        grad_sums, grad_seen = scan.backward(grad_before, arriving)
        self.carry = scan.keep(self.carry).add_(grad_seen)
        self.windows = {edge: scan.keep(x) for edge, x in self.windows.items()}
        if block.begins_segment and block.boundary < block.start:
            self.windows[block.boundary] = self.carry
        self.windows.pop(block.start, None)
        return grad_sums.view(keys.num_heads, -1, *state)
