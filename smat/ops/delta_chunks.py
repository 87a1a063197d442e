"""The delta rule over blocks of chunks, forward and backward (extension appendix, GDN).

One triangular inverse a chunk (WY form) turns c rank-one steps into a few products of matrices;
everything but the states at the chunks' edges is batched over chunks, heads and batch. The
backward pass keeps the inputs and those states, and builds a block of tiles again when it needs
it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smat.ops.wy import TILES_PER_BLOCK, WYTiles, compute_dtype, cut, paste


class DeltaChunks:
    """A sequence cut into blocks of chunks; tiles are chunk-major, so a state step is one slice."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        beta: Tensor,
        log_decay: Tensor,
        initial_state: Tensor | None,
        scale: float,
        chunk_size: int,
    ) -> None:
        self.q, self.k, self.v, self.scale, self.chunk_size = q, k, v, scale, chunk_size
        self.gates = beta.unsqueeze(-1), log_decay.unsqueeze(-1)
        self.initial_state = initial_state
        batch, seq_len, heads, _ = k.shape
        value_like = initial_state if v is None else v
        assert value_like is not None
        self.value_dim = value_like.shape[-1]
        self.dtype = compute_dtype(q, k, v, initial_state)
        self.rows = batch * heads
        self.num_chunks = -(-seq_len // chunk_size)
        self.per_block = max(1, TILES_PER_BLOCK // self.rows)

    def blocks(self) -> list[tuple[int, int]]:
        """First chunk and number of chunks of every block."""
        starts = range(0, self.num_chunks, self.per_block)
        return [(first, min(self.per_block, self.num_chunks - first)) for first in starts]

    def cut(self, x: Tensor, first: int, count: int) -> Tensor:
        return cut(x, first * self.chunk_size, count, self.chunk_size, self.dtype)

    def tiles(self, first: int, count: int) -> WYTiles:
        beta, log_decay = (self.cut(x, first, count) for x in self.gates)
        q = self.cut(self.q, first, count).mul_(self.scale)
        return WYTiles(q, self.cut(self.k, first, count), beta, log_decay)

    def _by_chunk(self, tiles: Tensor, count: int) -> Tensor:
        return tiles.view(count, self.rows, *tiles.shape[1:])

    def forward(self, keep_states: bool) -> tuple[Tensor, Tensor, Tensor]:
        batch, seq_len, heads, key_dim = self.k.shape
        out_dtype = self.k.dtype if self.v is None else self.v.dtype
        out = self.k.new_empty(batch, seq_len, heads, self.value_dim, dtype=out_dtype)
        num_kept = self.num_chunks if keep_states else min(self.per_block, self.num_chunks)
        shape = (num_kept + 1, self.rows, key_dim, self.value_dim)
        states = self.k.new_empty(shape, dtype=self.dtype)
        if self.initial_state is None:
            states[0].zero_()
        else:
            states[0] = self.initial_state.flatten(0, 1)
        for first, count in self.blocks():
            window = states[first : first + count + 1] if keep_states else states[: count + 1]
            paste(self._block_forward(first, count, window), out, first * self.chunk_size)
            if not keep_states:
                states[0] = window[-1]
        final = states[-1 if keep_states else 0].clone().view(batch, heads, *shape[2:])
        return out, final, states if keep_states else states.new_empty(0)

    def _block_forward(self, first: int, count: int, states: Tensor) -> Tensor:
        tiles = self.tiles(first, count)
        transition = self._by_chunk(tiles.transition(), count)
        if self.v is None:
            for i in range(count):
                torch.bmm(transition[i], states[i], out=states[i + 1])
            start = states[:-1].flatten(0, 1)
            update = torch.bmm(tiles.erase, start).neg_()
        else:
            update = torch.bmm(tiles.inverse, self.cut(self.v, first, count).mul_(tiles.beta))
            writes = self._by_chunk(torch.bmm(tiles.key_out.mT, update), count)
            for i in range(count):
                torch.baddbmm(writes[i], transition[i], states[i], out=states[i + 1])
            start = states[:-1].flatten(0, 1)
            update.baddbmm_(tiles.erase, start, alpha=-1)
        return torch.bmm(tiles.reads, update).baddbmm_(tiles.query_in, start)

    def backward(
        self, states: Tensor, grad_out: Tensor | None, grad_final: Tensor | None
    ) -> list[Tensor]:
        given = [self.q, self.k, self.k[..., :0] if self.v is None else self.v, *self.gates]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
        grad_state = torch.zeros_like(states[0])
        if grad_final is not None:
            grad_state.copy_(grad_final.flatten(0, 1))
        if grad_out is None:
            grad_out = self.k.new_zeros(()).expand(*self.k.shape[:3], self.value_dim)
        for first, count in reversed(self.blocks()):
            window = states[first : first + count + 1]
            found, grad_state = self._block_backward(first, count, window, grad_out, grad_state)
            for tiles, grad in zip(found, grads, strict=True):
                paste(tiles, grad, first * self.chunk_size)
        initial = grad_state.view(self.k.shape[0], -1, *grad_state.shape[1:])
        return [*grads[:3], grads[3].squeeze(-1), grads[4].squeeze(-1), initial]

    def _block_backward(
        self, first: int, count: int, states: Tensor, grad_out: Tensor, grad_state: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        tiles = self.tiles(first, count)
        start = states[:-1].flatten(0, 1)
        grad_y = self.cut(grad_out, first, count)
        # U = (I + L)^-1 diag(beta) (V - K_in S_0), and what the outputs send to it.
        target = torch.bmm(tiles.key_in, start).neg_()
        if self.v is not None:
            target += self.cut(self.v, first, count)
        update = torch.bmm(tiles.inverse, tiles.beta * target)
        grad_update = torch.bmm(tiles.reads.mT, grad_y)
        # The states' recurrence, transposed: grad S_0 = M' grad S_c + R' grad_y.
        received = torch.bmm(tiles.query_in.mT, grad_y)
        received.baddbmm_(tiles.erase.mT, grad_update, alpha=-1)
        received = self._by_chunk(received, count)
        transition = self._by_chunk(tiles.transition(), count)
        grad_ends = torch.empty_like(states)
        grad_ends[count] = grad_state
        for i in reversed(range(count)):
            torch.baddbmm(received[i], transition[i].mT, grad_ends[i + 1], out=grad_ends[i])
        grad_end = grad_ends[1:].flatten(0, 1)
        grad_update.baddbmm_(tiles.key_out, grad_end)
        grad_input = torch.bmm(tiles.inverse.mT, grad_update)
        grad_v = tiles.beta * grad_input
        grad_q, grad_k, grad_beta, grad_gate = tiles.backward(
            grad_reads=torch.bmm(grad_y, update.mT),
            grad_lower=torch.bmm(grad_input, update.mT).neg_(),
            grad_query_in=torch.bmm(grad_y, start.mT),
            grad_key_in=torch.bmm(grad_v, start.mT).neg_(),
            grad_key_out=torch.bmm(update, grad_end.mT),
            grad_end=(states[1:].flatten(0, 1) * grad_end).sum((1, 2)),
        )
        grad_beta += (grad_input * target).sum(-1, keepdim=True)
        grad_v = grad_v[..., :0] if self.v is None else grad_v
        return [grad_q.mul_(self.scale), grad_k, grad_v, grad_beta, grad_gate], grad_ends[0]
