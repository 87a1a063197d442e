"""The tree of chunk blocks that log-linear attention reads (levels bit_length(t XOR s)).

A pair of chunks z > y whose highest differing bit is b has level c + 1 + b: token t of chunk z sees
chunk y as part of the block of 2^b chunks before its own. So at height b the queries in odd blocks
of 2^b chunks read the summary of the even block to their left, all at once, and summaries of pairs
of blocks make the next height: T/2 reads a height, 2 T/c summaries in all, no table of levels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor


def pack(x: Tensor, chunk_size: int, dtype: torch.dtype) -> Tensor:
    """(B, T, H, f) -> (B H, chunks, c, f), zeros behind the last token."""
    rows = x.transpose(1, 2).to(dtype)
    missing = -x.shape[1] % chunk_size
    rows = F.pad(rows, (0, 0, 0, missing)) if missing else rows.contiguous()
    return rows.reshape(x.shape[0] * x.shape[2], -1, chunk_size, x.shape[3])


def unpack(rows: Tensor, like: Tensor) -> Tensor:
    """(B H, chunks, c, f) -> (B, T, H, f), with the batch, length, heads and dtype of `like`."""
    batch, seq_len, heads = like.shape[:3]
    x = rows.view(batch, heads, -1, rows.shape[-1])[:, :, :seq_len]
    return x.transpose(1, 2).to(like.dtype).contiguous()


def level_table(chunk_size: int, num_levels: int, like: Tensor) -> Tensor:
    """Mark the level of every pair inside a chunk, one-hot (c, c, L'), L' <= num_levels.

    >>> level_table(4, 9, torch.empty(0)).argmax(-1).tril()
    tensor([[0, 0, 0, 0],
            [1, 0, 0, 0],
            [2, 2, 0, 0],
            [2, 2, 1, 0]])
    """
    token = torch.arange(chunk_size, device=like.device)
    differ = token[:, None] ^ token
    inner = chunk_size.bit_length()
    levels = sum((differ >> bit > 0).long() for bit in range(inner - 1))
    num_inner = min(inner, num_levels)
    levels = torch.as_tensor(levels, device=like.device).clamp(max=num_inner - 1)
    return F.one_hot(levels, num_inner).to(like.dtype)


def spread_levels(weights: Tensor, table: Tensor) -> Tensor:
    """Give every pair of a tile the weight of its level, (N, c, L) -> (N, c, c)."""
    return torch.einsum("nil,ijl->nij", weights[..., : table.shape[-1]], table)


def gather_levels(pairs: Tensor, table: Tensor, num_levels: int) -> Tensor:
    """Sum the pairs of every level, (N, c, c) -> (N, c, L): the adjoint of spreading."""
    summed = torch.einsum("nij,ijl->nil", pairs, table)
    return F.pad(summed, (0, num_levels - table.shape[-1]))


def heights(num_chunks: int, chunk_size: int, num_levels: int) -> Iterator[tuple[int, int]]:
    """Yield the block size (in chunks) and the level of every height of the tree.

    >>> list(heights(num_chunks=5, chunk_size=8, num_levels=6))
    [(1, 4), (2, 5), (4, 5)]
    """
    size, level = 1, chunk_size.bit_length()
    while size < num_chunks:
        yield size, min(level, num_levels - 1)
        size, level = 2 * size, level + 1


def odd_blocks(x: Tensor, size: int) -> list[tuple[slice, Tensor]]:
    """View the odd blocks of `size` chunks in (N, chunks, ...), with the even blocks they read.

    Whole pairs come first, as (N, pairs, size, ...), then the block that the end cut short.

    >>> [(even, odd.tolist()) for even, odd in odd_blocks(torch.arange(8)[None], 2)]
    [(slice(0, 4, 2), [[[2, 3], [6, 7]]])]
    >>> [(even, odd.tolist()) for even, odd in odd_blocks(torch.arange(7)[None], 4)]
    [(slice(0, 1, 2), [[[4, 5, 6]]])]
    """
    num_chunks = x.shape[1]
    pairs = num_chunks // (2 * size)
    found = []
    if pairs:
        whole = torch.unflatten(x[:, : 2 * pairs * size], 1, (pairs, 2, size))
        found.append((slice(0, 2 * pairs, 2), whole[:, :, 1]))
    if num_chunks > (2 * pairs + 1) * size:
        rest = x[:, (2 * pairs + 1) * size :].unsqueeze(1)
        found.append((slice(2 * pairs, 2 * pairs + 1, 2), rest))
    return found


def pairs_of(table: Tensor) -> tuple[Tensor, Tensor]:
    """View the left and the right block of every whole pair, (N, blocks, ...)."""
    whole = torch.unflatten(table[:, : table.shape[1] // 2 * 2], 1, (-1, 2))
    return whole[:, :, 0], whole[:, :, 1]
