"""The causal branch: chunk summaries, an exclusive scan, dense tiles (equation 8, adjoint 12).

Within a recent window,

    y_i = phi_i . S_in[b] + sum over j <= i of the chunk of (phi_i . psi_j) v_j,
    S_in[b] = sum over the window's earlier chunks of D_a,   D_a = sum over j in a of psi_j v_j',

and with gates every term carries exp(lambda_i - lambda_j), taken apart at the chunk's edges.

The scan over the chunks of a block is one product with a lower-triangular matrix, ones or decay
factors, so gated and ungated run the same code and no loop over chunks is left. One block of tiles
is alive at a time (it stays in cache), and the state at its start is all that the backward pass
needs besides the inputs.

Shapes: phi (N, G, R, r), psi (N, T, r), v (N, T, p), y (N, G, R, p) for N rows of keys with G heads
of queries each, at R = T or at R given positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smat.ops.decay import LogDecay
from smat.ops.pieces import Block
from smat.ops.tiles import KeyTiles, QueryTiles


@dataclass(frozen=True)
class CausalBranch:
    """Keys, values and gates of some rows, and the blocks in which they are worked off."""

    psi: Tensor
    v: Tensor
    decay: LogDecay | None
    blocks: Sequence[Block]
    positions: Tensor | None = None  # sorted

    def forward(self, phi: Tensor, y: Tensor) -> None:
        """Add the branch to y."""
        carry = zero = self._zero()
        windows = _Windows(zero)
        for block, taken in zip(self.blocks, self._taken(), strict=True):
            carry = windows.enter(block, carry)
            keys = KeyTiles(block, self.psi, self.v, self.decay)
            sums = keys.chunk_sums(carry)
            windows.advance(keys, sums)
            if taken.stop == taken.start:
                carry = keys.advance(sums, carry)
                continue
            states = keys.scan(sums)
            queries = QueryTiles(keys, phi, self.positions, taken)
            scores = queries.hide_future_(torch.bmm(queries.phi, queries.of_chunks(keys.psi).mT))
            y_tiles = torch.bmm(scores, queries.of_chunks(keys.v))
            before = self._per_chunk(states[:, :-1])
            y_tiles.baddbmm_(queries.from_start, queries.of_chunks(before))
            queries.add(y_tiles, y)
            carry = states[:, -1].view_as(zero)

    def backward(
        self, phi: Tensor, grad_y: Tensor, grad_phi: Tensor, grad_psi: Tensor, grad_v: Tensor
    ) -> None:
        """Add the branch's gradients, last block first."""
        grad_carry = zero = self._zero()
        grad_windows: dict[int, Tensor] = {}
        work = zip(self.blocks, self._taken(), self._starts(), strict=True)
        for block, taken, carry in reversed(list(work)):
            if block.ends_segment:
                grad_carry = zero
            keys = KeyTiles(block, self.psi, self.v, self.decay)
            # Every state's gradient goes to the sums before it: the scan, transposed.
            grad_states = zero.new_zeros(len(zero), block.num_chunks + 1, zero[0].numel())
            grad_states[:, -1] = grad_carry.flatten(1)
            if taken.stop > taken.start:
                queries = QueryTiles(keys, phi, self.positions, taken)
                grad_tiles = queries.cut(grad_y)
                asked = queries.to_chunks(torch.bmm(queries.from_start.mT, grad_tiles))
                grad_states[:, :-1] = asked.view(len(zero), block.num_chunks, -1)
                states = keys.scan(keys.chunk_sums(carry))
                before = queries.of_chunks(self._per_chunk(states[:, :-1]))
                self._tiles_backward(queries, before, grad_tiles, grad_phi, grad_psi, grad_v)
            grad_sums = torch.bmm(keys.between.mT, grad_states)
            last = keys.between[:, -1, :, None]
            for edge, grad_state in grad_windows.items():
                grad_sums[:, 1:].addcmul_(last[:, 1:], grad_state.flatten(1).unsqueeze(1))
                grad_windows[edge] = last[:, :1] * grad_state
            self._sums_backward(keys, self._per_chunk(grad_sums[:, 1:]), grad_psi, grad_v)
            grad_carry = grad_sums[:, 0].view_as(zero)
            if block.begins_segment and block.boundary < block.start:
                grad_windows[block.boundary] = grad_carry
            grad_windows.pop(block.start, None)

    @staticmethod
    def _tiles_backward(
        queries: QueryTiles,
        before: Tensor,
        grad_y: Tensor,
        grad_phi: Tensor,
        grad_psi: Tensor,
        grad_v: Tensor,
    ) -> None:
        """Gradients of dense tiles, and of the queries that read the states before their chunks."""
        keys = queries.keys
        psi, v = queries.of_chunks(keys.psi), queries.of_chunks(keys.v)
        grad_scores = queries.hide_future_(torch.bmm(grad_y, v.mT))
        scores = queries.hide_future_(torch.bmm(queries.phi, psi.mT))
        read = torch.bmm(grad_y, before.mT)
        if keys.decay is not None:
            read *= queries.since_start
        queries.add(read.baddbmm_(grad_scores, psi), grad_phi)
        keys.add(queries.to_chunks(torch.bmm(grad_scores.mT, queries.phi)), grad_psi)
        keys.add(queries.to_chunks(torch.bmm(scores.mT, grad_y)), grad_v)

    @staticmethod
    def _sums_backward(
        keys: KeyTiles, grad_chunk: Tensor, grad_psi: Tensor, grad_v: Tensor
    ) -> None:
        """Gradients of the chunk sums psi v'."""
        grad = torch.bmm(keys.v, grad_chunk.mT)
        if keys.decay is not None:
            grad *= keys.until_end
        keys.add(grad, grad_psi)
        keys.add(torch.bmm(keys.to_end, grad_chunk), grad_v)

    def _starts(self) -> list[Tensor]:
        """Find the state at the start of every block again, from the keys alone."""
        carry = zero = self._zero()
        windows, starts = _Windows(zero), []
        for block in self.blocks:
            carry = windows.enter(block, carry)
            starts.append(carry)
            keys = KeyTiles(block, self.psi, self.v, self.decay)
            sums = keys.chunk_sums(carry)
            carry = keys.advance(sums, carry)
            windows.advance(keys, sums)
        return starts

    def _taken(self) -> list[slice]:
        """Find which queries fall into each block."""
        if self.positions is None:
            return [slice(block.start, block.stop) for block in self.blocks]
        edges = [block.start for block in self.blocks] + [self.blocks[-1].stop]
        where = torch.tensor(edges, device=self.positions.device)
        cuts = torch.searchsorted(self.positions, where).tolist()
        return [slice(first, last) for first, last in itertools.pairwise(cuts)]

    def _zero(self) -> Tensor:
        return self.psi.new_zeros(len(self.psi), self.psi.shape[-1], self.v.shape[-1])

    def _per_chunk(self, states: Tensor) -> Tensor:
        """(N, chunks, r p) -> (N chunks, r, p)."""
        return states.reshape(-1, self.psi.shape[-1], self.v.shape[-1])


class _Windows:
    """The states of windows that later segments will look through, kept up to date."""

    def __init__(self, zero: Tensor) -> None:
        self.zero = zero
        self.states: dict[int, Tensor] = {}

    def enter(self, block: Block, carry: Tensor) -> Tensor:
        """Open a window that begins here; return the state that the block's queries look at."""
        if block.opens_window:
            self.states[block.start] = self.zero
        if not block.begins_segment:
            return carry
        if block.boundary == block.start:
            return self.zero
        carry = self.states.pop(block.boundary, self.zero)
        self.states = {edge: state for edge, state in self.states.items() if edge > block.boundary}
        return carry

    def advance(self, keys: KeyTiles, sums: Tensor) -> None:
        """Add a block to every open window."""
        for edge, state in self.states.items():
            self.states[edge] = keys.advance(sums, state)
