"""Chunks of delta-rule transitions in WY form: what the delta rule and its transports share.

With A_t = a_t (I - beta_t k_t k_t') and gamma the running log decay inside a chunk of c tokens,

    S_i = exp(gamma_i) S_0 + sum over j <= i of exp(gamma_i - gamma_j) k_j u_j',
    (I + L) U = diag(beta) (V - diag(exp gamma) K S_0),
    L_ij = beta_i exp(gamma_i - gamma_j) (k_i . k_j) for i > j,

so that one triangular inverse a chunk replaces c products of r x r matrices, and the product of
the chunk's transitions is  M = exp(gamma_c) I - K_out' (I + L)^-1 diag(beta) K_in  with
K_in = diag(exp gamma) K and K_out = diag(exp(gamma_c - gamma)) K.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from smat.ops.decay import FORGETS, LogDecay

TILES_PER_BLOCK = 64  # enough for batched products on all cores, few enough to stay in cache
SUBSTITUTED_BLOCK = 8

_P = ParamSpec("_P")
_R = TypeVar("_R")


def full_precision(kernel: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep autocast out of a kernel, which chooses its own precision."""

    @wraps(kernel)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        device = next(x for x in args if isinstance(x, Tensor)).device.type
        with torch.autocast(device, enabled=False):
            return kernel(*args, **kwargs)

    return run


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """Find the dtype to accumulate in: the widest given, and at least fp32."""
    dtype = torch.float32
    for x in tensors:
        if x is not None:
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def check_gates(log_decay: Tensor) -> None:
    """Refuse a gate that grows; on a GPU looking would wait for the device, so it is trusted."""
    if log_decay.device.type == "cpu" and bool((log_decay > 0).any()):
        largest = log_decay.max().item()
        raise ValueError(f"log_decay must be <= 0 everywhere, but its largest value is {largest}")


def cut(x: Tensor, start: int, num_chunks: int, chunk_size: int, dtype: torch.dtype) -> Tensor:
    """Take chunks out of (B, T, H, f) as tiles (chunks B H, c, f), zeros behind the last token."""
    batch, seq_len, heads, width = x.shape
    stop = min(seq_len, start + num_chunks * chunk_size)
    tiles = torch.empty(
        num_chunks, batch, heads, chunk_size, width, dtype=dtype, device=x.device
    )  # fmt: skip
    full, rest = divmod(stop - start, chunk_size)
    whole = torch.unflatten(x[:, start : start + full * chunk_size], 1, (full, chunk_size))
    tiles[:full] = whole.permute(1, 0, 3, 2, 4)
    if rest:
        tiles[full, :, :, :rest] = x[:, stop - rest : stop].transpose(1, 2)
        tiles[full, :, :, rest:] = 0
    return tiles.flatten(0, 2)


def paste(tiles: Tensor, to: Tensor, start: int) -> None:
    """Write tiles (chunks B H, c, f) back to (B, T, H, f), from token `start` on."""
    batch, seq_len, heads, _ = to.shape
    chunk_size = tiles.shape[1]
    chunks = torch.unflatten(tiles, 0, (len(tiles) // (batch * heads), batch, heads))
    full, rest = divmod(min(seq_len - start, len(chunks) * chunk_size), chunk_size)
    whole = torch.unflatten(to[:, start : start + full * chunk_size], 1, (full, chunk_size))
    whole.copy_(chunks[:full].permute(1, 0, 3, 2, 4))
    if rest:
        tail = start + full * chunk_size
        to[:, tail : tail + rest] = chunks[full, :, :, :rest].transpose(1, 2)


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Invert I + strict lower part of (N, c, c), c a power of two; the upper part is not read.

    Small diagonal blocks are solved by substitution, all tiles at once; then blocks double in size:
    [[X, 0], [Z, Y]]^-1 = [[X^-1, 0], [-Y^-1 Z X^-1, Y^-1]].
    Powers of the matrix would take fewer steps, but with keys alike they grow like binomials.
    """
    size = lower.shape[1]
    block = min(size, SUBSTITUTED_BLOCK)
    inverse = torch.zeros_like(lower)
    inverse.diagonal(dim1=1, dim2=2).fill_(1.0)
    _substitute(lower, inverse, block)
    while block < size:
        for start in range(0, size, 2 * block):
            upper, under = slice(start, start + block), slice(start + block, start + 2 * block)
            product = torch.bmm(lower[:, under, upper], inverse[:, upper, upper])
            inverse[:, under, upper] = torch.bmm(inverse[:, under, under], product).neg_()
        block *= 2
    return inverse


def _substitute(lower: Tensor, inverse: Tensor, block: int) -> None:
    """Fill the strict lower part of the inverse's diagonal blocks, row by row."""
    shape = (len(lower), lower.shape[1] // block, block, lower.shape[1] // block, block)
    rows = lower.view(shape).diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3)
    rows = rows.contiguous()  # (row, column, tile, block): long vectors for short loops
    found = rows.neg()
    for i in range(2, block):
        for j in range(1, i):
            found[i, :j].addcmul_(rows[i, j], found[j, :j], value=-1)
    target = inverse.view(shape).diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3)
    for i in range(1, block):
        target[i, :i] = found[i, :i]


class WYTiles:
    """Tiles of queries (scaled), keys, beta and gates with every product that needs no state.

    q, k (N, c, K), beta (N, c, 1), log_decay (N, c, 1). `reads` is tril(Q K') with decay, `overlap`
    K K' with decay (used below its diagonal), `erase` W = (I + L)^-1 diag(beta) K_in.
    """

    def __init__(self, q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor) -> None:
        self.q, self.k, self.beta, self.log_decay = q, k, beta, log_decay.squeeze(-1)
        decay = LogDecay(self.log_decay)
        size = k.shape[1]
        counts = torch.arange(1, size + 1, device=k.device)
        self.inside = decay.triangle(counts, k.dtype)
        self.since_start = decay.between(counts, torch.zeros_like(counts), k.dtype).unsqueeze(-1)
        self.until_end = decay.between(counts[-1:], counts, k.dtype).unsqueeze(-1)
        self.reads = torch.bmm(q, k.mT).mul_(self.inside)
        self.overlap = torch.bmm(k, k.mT).mul_(self.inside)
        self.inverse = unit_lower_inverse(beta * self.overlap)
        self.query_in = q * self.since_start
        self.key_in = k * self.since_start
        self.key_out = k * self.until_end
        self.erase = torch.bmm(self.inverse, beta * self.key_in)

    def transition(self) -> Tensor:
        """Multiply the chunk's transitions: M, (N, K, K)."""
        product = torch.bmm(self.key_out.mT, self.erase).neg_()
        product.diagonal(dim1=1, dim2=2).add_(self.since_start[:, -1])
        return product

    def backward(
        self,
        grad_reads: Tensor,
        grad_lower: Tensor,
        grad_query_in: Tensor,
        grad_key_in: Tensor,
        grad_key_out: Tensor,
        grad_end: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Carry gradients to q (scaled), k, beta and the gates; `grad_lower` is that of L.

        A gate enters as exp(gamma_i) on a key or query that reads and as exp(-gamma_j) on a key
        that is read, so the two gradients of a key, kept apart, give the gate's. `grad_end` (N,)
        is <S_c, grad S_c>: the share of exp(gamma_c).
        """
        grad_reads = grad_reads.mul_(self.inside)
        grad_lower = grad_lower.tril_(-1)
        grad_beta = (grad_lower * self.overlap).sum(-1, keepdim=True)
        grad_overlap = grad_lower.mul_(self.inside).mul_(self.beta)
        grad_q = grad_query_in.mul_(self.since_start).baddbmm_(grad_reads, self.k)
        as_reader = grad_key_in.mul_(self.since_start).baddbmm_(grad_overlap, self.k)
        as_read = grad_key_out.mul_(self.until_end).baddbmm_(grad_overlap.mT, self.k)
        as_read = as_read.baddbmm_(grad_reads.mT, self.q)
        flow = (self.q * grad_q).sum(-1) + (self.k * (as_reader - as_read)).sum(-1)
        flow[:, -1] += grad_end
        grad_gate = flow.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1).to(flow.dtype)
        grad_gate = torch.where(self.log_decay <= FORGETS, 0.0, grad_gate)
        return grad_q, as_reader.add_(as_read), grad_beta, grad_gate.unsqueeze(-1)
