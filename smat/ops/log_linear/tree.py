"""The tree of chunks that log-linear attention reads (levels bit_length(t XOR s)).

A pair of chunks z > y whose highest differing bit is b has level log2(c) + 1 + b: token t of chunk
z sees chunk y as one of the 2^b chunks before its own 2^b. So at height b the queries in odd runs
of 2^b chunks read the summary of the even run to their left, all at once, and pairs of summaries
make the next height: T/2 reads a height, 2 T/c summaries in all, no table of levels.

A summary is what its chunks write, (K, V), and the product of their transitions: a matrix (K, K)
for the delta rule, a number (1, 1) for scalar decay. A query arrives at each height carried to the
start of its own run. These are the only places where the two forms differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.ops.delta_rule.chunks import (
    Recomputed,
    check_gates,
    chunk_decay,
    compute_dtype,
    pack,
    register_operator,
    token_ranges,
    unpack,
    wy_products,
)


def log_linear(*given: Tensor, scale: float, chunk_size: int) -> Tensor:
    """Attend for q, k, v, level_weights, log_decay, and beta for the delta rule."""
    out, _ = Recomputed.apply(  # type: ignore[no-untyped-call]
        _forward, _backward, scale, chunk_size, *given
    )
    return out


def level_table(chunk_size: int, num_levels: int, like: Tensor) -> Tensor:
    """Mark the level of every pair inside a chunk, one-hot (c, c, L'), L' <= num_levels.

    >>> level_table(4, 9, torch.empty(0)).argmax(-1).tril()
    tensor([[0, 0, 0, 0],
            [1, 0, 0, 0],
            [2, 2, 0, 0],
            [2, 2, 1, 0]])
    """
    token = torch.arange(chunk_size, device=like.device)
    differ = (token[:, None] ^ token).unsqueeze(-1)
    bits = torch.arange(chunk_size.bit_length() - 1, device=like.device)
    num_inner = min(chunk_size.bit_length(), num_levels)
    levels = (differ >> bits > 0).sum(-1).clamp(max=num_inner - 1)
    return F.one_hot(levels, num_inner).to(like.dtype)


def heights(num_chunks: int, chunk_size: int, num_levels: int) -> Iterator[tuple[int, int]]:
    """Yield the number of chunks in a run and the level of every height of the tree.

    >>> list(heights(num_chunks=5, chunk_size=8, num_levels=6))
    [(1, 4), (2, 5), (4, 5)]
    """
    size, level = 1, chunk_size.bit_length()
    while size < num_chunks:
        yield size, min(level, num_levels - 1)
        size, level = 2 * size, level + 1


def odd_runs(x: Tensor, size: int) -> list[Tensor]:
    """View the tokens of odd runs of `size` chunks in (N, chunks, c, f), as (N, runs, tokens, f).

    Those of full length come first, then the one that the end cut short.

    >>> [run.flatten(1).tolist() for run in odd_runs(torch.arange(7).view(1, 7, 1, 1), 1)]
    [[[1, 3, 5]]]
    >>> [run.flatten(1).tolist() for run in odd_runs(torch.arange(7).view(1, 7, 1, 1), 2)]
    [[[2, 3]], [[6]]]
    """
    pairs = x.shape[1] // (2 * size)
    whole = x[:, : 2 * pairs * size].unflatten(1, (pairs, 2, size))[:, :, 1].flatten(2, 3)
    rest = x[:, (2 * pairs + 1) * size :].unsqueeze(1).flatten(2, 3)
    return [runs for runs in (whole, rest) if runs.shape[1] * runs.shape[2]]


def even_runs(table: Tensor, num_chunks: int, size: int) -> list[Tensor]:
    """View the summaries (N, runs, ...) that the odd runs of `size` chunks read, in their order."""
    pairs, num_odd = num_chunks // (2 * size), (num_chunks + size - 1) // (2 * size)
    left = table[:, : 2 * num_odd : 2]
    return [runs for runs in (left[:, :pairs], left[:, pairs:]) if runs.shape[1]]


class ChunkReads(NamedTuple):
    """What chunks (N, chunks, c, ...) read of themselves, and what others may read of them.

    `queries` are carried to their chunk's start, `written` (N, chunks, K, V) and `transition` are
    the chunk's summary. Inside a chunk a token reads `reads`, times `inverse` if there is one, of
    `writes`.
    """

    queries: Tensor
    written: Tensor
    transition: Tensor
    reads: Tensor
    inverse: Tensor | None
    writes: Tensor


def read_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None = None
) -> ChunkReads:
    """Summarise tiles q (scaled), k (..., c, K), v (..., c, V), gates (..., c, 1)."""
    if beta is None:
        inside, since_start, until_end = chunk_decay(log_decay, k.dtype)
        written = (k * until_end).mT @ v
        transition = since_start[..., -1:, :]
        return ChunkReads(q * since_start, written, transition, (q @ k.mT) * inside, None, v)
    wy = wy_products(q, k, v, beta, log_decay)
    queries = wy.query_in - wy.reads @ wy.erased
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    transition = wy.kept * eye - wy.key_out.mT @ wy.erased
    written = wy.key_out.mT @ wy.written
    return ChunkReads(queries, written, transition, wy.reads, wy.inverse, beta * v)


def outputs_within(chunks: ChunkReads, weights: Tensor) -> Tensor:
    """Let every token read its own chunk with the weights (N, chunks, c, L) of its levels."""
    table = level_table(weights.shape[-2], weights.shape[-1], weights)
    spread = torch.einsum("nzil,ijl->nzij", weights[..., : table.shape[-1]], table)
    inner = chunks.reads if chunks.inverse is None else chunks.reads @ chunks.inverse
    return (inner * spread) @ chunks.writes


def _carry(transition: Tensor, x: Tensor) -> Tensor:
    """Apply a transition from the left; numbers too small to be normal would only be slow."""
    is_number = transition.shape[-1] == 1
    return _no_subnormals(transition * x if is_number else transition @ x)


def _no_subnormals(x: Tensor) -> Tensor:
    return F.hardshrink(x, torch.finfo(x.dtype).tiny)


def _join(written: Tensor, transition: Tensor) -> tuple[Tensor, Tensor]:
    """Join the summaries (N, runs, ...) of every whole pair of runs."""
    pairs = written.shape[1] // 2
    (left, right), (before, after) = (
        x[:, : 2 * pairs].unflatten(1, (pairs, 2)).unbind(2) for x in (written, transition)
    )
    return _carry(after, left) + right, _carry(after, before)


def add_reads(
    y: Tensor, queries: Tensor, written: Tensor, transition: Tensor, weights: Tensor
) -> None:
    """Add to y what all tokens read outside their chunks; the queries are overwritten."""
    num_chunks, chunk_size, num_levels = weights.shape[1:]
    for size, level in heights(num_chunks, chunk_size, num_levels):
        views = zip(
            odd_runs(y, size),
            odd_runs(queries, size),
            odd_runs(weights[..., level : level + 1], size),
            even_runs(written, num_chunks, size),
            even_runs(transition, num_chunks, size),
            strict=True,
        )
        for target, query, weight, seen, step in views:
            target += (query * weight) @ seen
            query.copy_(_carry(step.mT, query.mT).mT)
        written, transition = _join(written, transition)


def grads_of_reads(
    grad_y: Tensor, queries: Tensor, written: Tensor, transition: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the gradients of all but y in `add_reads`; the queries are overwritten."""
    num_chunks, chunk_size, num_levels = weights.shape[1:]
    climbed = []
    for size, level in heights(num_chunks, chunk_size, num_levels):
        kept = []
        for query, step in zip(
            odd_runs(queries, size), even_runs(transition, num_chunks, size), strict=True
        ):
            kept.append(query.clone())
            query.copy_(_carry(step.mT, query.mT).mT)
        climbed.append((size, level, written, transition, kept))
        written, transition = _join(written, transition)
    grad_queries = queries.zero_()  # nothing reads a query that has been carried all the way
    grad_weights = torch.zeros_like(weights)
    grad_table = torch.zeros_like(written), torch.zeros_like(transition)
    for size, level, written, transition, kept in reversed(climbed):
        grad_table = torch.func.vjp(_join, written, transition)[1](grad_table)
        views = zip(
            kept,
            odd_runs(weights[..., level : level + 1], size),
            even_runs(written, num_chunks, size),
            even_runs(transition, num_chunks, size),
            odd_runs(grad_y, size),
            odd_runs(grad_queries, size),
            odd_runs(grad_weights[..., level : level + 1], size),
            even_runs(grad_table[0], num_chunks, size),
            even_runs(grad_table[1], num_chunks, size),
            strict=True,
        )
        for query, weight, seen, step, grad, grad_query, grad_weight, grad_seen, grad_step in views:
            pulled = grad @ seen.mT
            grad_weight += (pulled * query).sum(-1, keepdim=True)
            grad_seen += (query * weight).mT @ grad
            if step.shape[-1] == 1:
                grad_step += (query * grad_query).sum((-2, -1), keepdim=True)
            else:
                grad_step += query.mT @ grad_query
            onward = _carry(step, grad_query.mT).mT
            grad_query.copy_(pulled.mul_(weight).add_(onward))
    return grad_queries, *grad_table, grad_weights


def _summarise(
    given: Sequence[Tensor], scale: float, chunk_size: int
) -> tuple[ChunkReads, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Pack and read some chunks; what `add_reads` needs of them stands apart."""
    q, k, v, weights, *gates = given
    dtype = compute_dtype(q, k, v, weights)
    q, k, v, weights = (pack(x, chunk_size, dtype) for x in (q, k, v, weights))
    log_decay, *beta = (pack(x.unsqueeze(-1), chunk_size, dtype) for x in gates)
    chunks = read_chunks(q * scale, k, v, log_decay, *beta)
    return chunks, (chunks.queries, chunks.written, chunks.transition, weights)


def _run_chunks(*given: Tensor, scale: float, chunk_size: int) -> tuple[Tensor, ...]:
    chunks, tree = _summarise(given, scale, chunk_size)
    return outputs_within(chunks, tree[-1]), *tree


@register_operator("smat::log_linear")
def _forward(given: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    check_gates(given[4])
    run = partial(_run_chunks, scale=scale, chunk_size=chunk_size)
    ranges = token_ranges(given[1], chunk_size)
    found = [run(*(x[:, tokens] for x in given)) for tokens in ranges]
    y, *tree = (torch.cat(tiles, 1) for tiles in zip(*found, strict=True))
    add_reads(y, *tree)
    return [unpack(y, given[2]).contiguous(), y.new_empty(len(given[2]), 0)]


@register_operator("smat::log_linear_backward")
def _backward(tensors: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    """Build the tree again, carry gradients down it, and run a few chunks again at a time."""
    *given, _, grad = tensors
    run = partial(_run_chunks, scale=scale, chunk_size=chunk_size)
    ranges = token_ranges(given[1], chunk_size)
    found = [_summarise([x[:, tokens] for x in given], scale, chunk_size)[1] for tokens in ranges]
    num_chunks = [weights.shape[1] for *_, weights in found]
    tree = [torch.cat(tiles, 1) for tiles in zip(*found, strict=True)]
    grad_y = pack(grad, chunk_size, tree[0].dtype)
    grad_tiles = (grad_y, *grads_of_reads(grad_y, *tree))
    by_range = zip(*(x.split(num_chunks, 1) for x in grad_tiles), strict=True)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    for tokens, received in zip(ranges, by_range, strict=True):
        pull = torch.func.vjp(run, *(x[:, tokens] for x in given))[1]
        for grad, some in zip(grads, pull(received), strict=True):
            grad[:, tokens] = some
    return grads


@_forward.register_fake
def _(given: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    out = torch.empty_like(given[2], memory_format=torch.contiguous_format)
    return [out, out.new_empty(len(out), 0, dtype=compute_dtype(*given[:4]))]


@_backward.register_fake
def _(tensors: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[:-2]]
