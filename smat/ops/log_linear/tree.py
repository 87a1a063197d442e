"""The tree of chunks that log-linear attention reads (levels bit_length(t XOR s)).

A pair of chunks z > y whose highest differing bit is b has level log2(c) + 1 + b: token t of chunk
z sees chunk y as one of the 2^b chunks before its own 2^b. So at height b the queries in odd runs
of 2^b chunks read the summary of the even run to their left, all at once, and pairs of summaries
make the next height: T/2 reads a height, 2 T/c summaries in all.

A summary is what its chunks write, (K, V), and the product of their transitions: a matrix (K, K)
for the delta rule, a number (1, 1) for scalar decay. A query arrives at each height carried to the
start of its own run; of numbers, which commute, only the product is carried.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.ops.delta_rule.chunks import TileDecay, WYTiles


def level_table(chunk_size: int, num_levels: int, like: Tensor) -> Tensor:
    """Mark the level of every pair inside a chunk, one-hot (c, c, L'), L' <= num_levels."""
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

    >>> [run.flatten(1).tolist() for run in odd_runs(torch.arange(7).view(1, 7, 1, 1), 2)]
    [[[2, 3]], [[6]]]

    Those of full length come first, then the one that the end cut short.
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


def spread_levels(weights: Tensor) -> Tensor:
    """Give every pair of a tile the weight of its level, (N, c, L) -> (N, c, c)."""
    table = level_table(weights.shape[1], weights.shape[2], weights)
    return torch.einsum("nil,ijl->nij", weights[..., : table.shape[-1]], table)


def gather_levels(pairs: Tensor, num_levels: int) -> Tensor:
    """Sum the pairs of every level, (N, c, c) -> (N, c, L): the adjoint of spreading."""
    table = level_table(pairs.shape[1], num_levels, pairs)
    summed = torch.einsum("nij,ijl->nil", pairs, table)
    return F.pad(summed, (0, num_levels - table.shape[-1]))


class DecayTiles:
    """Tiles q (scaled), k (N, c, K), v (N, c, V), log_decay (N, c, 1), and their summaries.

    `inner` (N, c, c) times `writes` is what tokens read of their own chunk, were all weights one.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> None:
        self.q, self.k, self.writes, self.decay = q, k, v, TileDecay(log_decay, k.dtype)
        self.key_out = k * self.decay.until_end
        self.queries = q * self.decay.since_start
        self.written = torch.bmm(self.key_out.mT, v)
        self.transition = self.decay.since_start[:, -1:]

    @cached_property
    def inner(self) -> Tensor:
        return torch.bmm(self.q, self.k.mT).mul_(self.decay.inside)

    def backward(
        self, grad_inner: Tensor, grad_writes: Tensor, *grad_summary: Tensor
    ) -> tuple[Tensor, ...]:
        """Carry gradients, that of the summary in its order, to q (scaled), k, v and the gates."""
        grad_queries, grad_written, grad_transition = grad_summary
        grad_key_out = torch.bmm(self.writes, grad_written.mT)
        since = (grad_queries * self.queries).sum(-1)
        since[:, -1:] += (grad_transition * self.transition).squeeze(-1)
        until = (grad_key_out * self.key_out).sum(-1)
        grad_gate = self.decay.backward(grad_inner * self.inner, since, until)
        grad_inner = grad_inner.mul_(self.decay.inside)
        grad_q = (grad_queries * self.decay.since_start).baddbmm_(grad_inner, self.k)
        grad_k = grad_key_out.mul_(self.decay.until_end).baddbmm_(grad_inner.mT, self.q)
        return grad_q, grad_k, grad_writes.baddbmm_(self.key_out, grad_written), grad_gate


class DeltaTiles:
    """The same with delta-rule transitions: one more tile, beta (N, c, 1)."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> None:
        self.v, self.writes = v, v * beta
        self.wy = WYTiles(q, k, beta, log_decay)
        self.queries = torch.baddbmm(self.wy.query_in, self.wy.reads, self.wy.erase, alpha=-1)
        self.update = torch.bmm(self.wy.inverse, self.writes)
        self.written = torch.bmm(self.wy.key_out.mT, self.update)
        self.transition = self.wy.transition()

    @cached_property
    def inner(self) -> Tensor:
        return torch.bmm(self.wy.reads, self.wy.inverse)

    def backward(
        self, grad_inner: Tensor, grad_writes: Tensor, *grad_summary: Tensor
    ) -> tuple[Tensor, ...]:
        """Carry gradients to q (scaled), k, v, the gates and beta."""
        wy, (grad_queries, grad_written, grad_transition) = self.wy, grad_summary
        # Through the inverse: grad L = -(I + L)^-T grad (I + L)^-T, one term for each of its uses.
        through_update = torch.bmm(wy.inverse.mT, torch.bmm(wy.key_out, grad_written))
        grad_erase = torch.bmm(wy.reads.mT, grad_queries)
        grad_erase.baddbmm_(wy.key_out, grad_transition).neg_()
        through_erase = torch.bmm(wy.inverse.mT, grad_erase)
        through_inner = torch.bmm(grad_inner, wy.inverse.mT)
        grad_lower = torch.bmm(self.inner.mT, through_inner)
        grad_lower.baddbmm_(through_update, self.update.mT).baddbmm_(through_erase, wy.erase.mT)
        grad_writes += through_update
        grad_key_out = torch.bmm(self.update, grad_written.mT)
        grad_q, grad_k, grad_beta, grad_gate = wy.backward(
            grad_reads=through_inner.baddbmm_(grad_queries, wy.erase.mT, alpha=-1),
            grad_lower=grad_lower.neg_(),
            grad_query_in=grad_queries,
            grad_key_in=wy.beta * through_erase,
            grad_key_out=grad_key_out.baddbmm_(wy.erase, grad_transition.mT, alpha=-1),
            grad_kept=grad_transition.diagonal(dim1=1, dim2=2).sum(-1),
        )
        grad_beta += (through_erase * wy.key_in).sum(-1, keepdim=True)
        grad_beta += (grad_writes * self.v).sum(-1, keepdim=True)
        return grad_q, grad_k, grad_writes.mul_(wy.beta), grad_gate, grad_beta


def _carry(transition: Tensor, x: Tensor) -> Tensor:
    """Apply a transition from the left; numbers too small to be normal would only be slow."""
    product = transition * x if transition.shape[-1] == 1 else transition @ x
    return F.hardshrink(product, torch.finfo(product.dtype).tiny)


def _grad_of_step(step: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Multiply two matrices, or take the product's trace where a transition is a number."""
    if step.shape[-1] == 1:
        return (left * right.mT).sum((-2, -1), keepdim=True)
    return left @ right


def _pairs(table: Tensor) -> tuple[Tensor, Tensor]:
    """View the left and the right run of every whole pair, (N, runs, ...)."""
    pairs = table.shape[1] // 2
    left, right = table[:, : 2 * pairs].unflatten(1, (pairs, 2)).unbind(2)
    return left, right


def _join(written: Tensor, transition: Tensor) -> tuple[Tensor, Tensor]:
    """Join the summaries (N, runs, ...) of every whole pair of runs."""
    (left, right), (before, after) = _pairs(written), _pairs(transition)
    return _carry(after, left) + right, _carry(after, before)


def _grads_of_join(
    written: Tensor, transition: Tensor, grad_written: Tensor, grad_transition: Tensor
) -> tuple[Tensor, Tensor]:
    grads = torch.zeros_like(written), torch.zeros_like(transition)
    (left, _), (before, after) = _pairs(written), _pairs(transition)
    (grad_left, grad_right), (grad_before, grad_after) = map(_pairs, grads)
    grad_left.copy_(_carry(after.mT, grad_written))
    grad_right.copy_(grad_written)
    grad_before.copy_(_carry(after.mT, grad_transition))
    grad_after.copy_(_grad_of_step(after, grad_written, left.mT))
    grad_after.add_(_grad_of_step(after, grad_transition, before.mT))
    return grads


def _carried(queries: Tensor, transition: Tensor, weights: Tensor) -> Tensor:
    """Tell what a transition is applied to on the way: queries, or a number for each of them."""
    return torch.ones_like(weights[..., :1]) if transition.shape[-1] == 1 else queries


def add_reads(
    y: Tensor, queries: Tensor, written: Tensor, transition: Tensor, weights: Tensor
) -> None:
    """Add to y what all tokens read outside their chunks; the queries may be overwritten."""
    num_chunks, chunk_size, num_levels = weights.shape[1:]
    carried = _carried(queries, transition, weights)
    for size, level in heights(num_chunks, chunk_size, num_levels):
        readers = (y, queries, carried, weights[..., level : level + 1])
        views = zip(
            *(odd_runs(x, size) for x in readers),
            *(even_runs(x, num_chunks, size) for x in (written, transition)),
            strict=True,
        )
        for target, query, arrived, weight, seen, step in views:
            target += (query * (weight if carried is queries else weight * arrived)) @ seen
            arrived.copy_(_carry(step.mT, arrived.mT).mT)
        written, transition = _join(written, transition)


def grads_of_reads(
    grad_y: Tensor, queries: Tensor, written: Tensor, transition: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the gradients of all but y in `add_reads`; the queries may be overwritten."""
    num_chunks, chunk_size, num_levels = weights.shape[1:]
    carried = _carried(queries, transition, weights)
    climbed = []
    for size, level in heights(num_chunks, chunk_size, num_levels):
        steps = even_runs(transition, num_chunks, size)
        kept = [arrived.clone() for arrived in odd_runs(carried, size)]
        for arrived, step in zip(odd_runs(carried, size), steps, strict=True):
            arrived.copy_(_carry(step.mT, arrived.mT).mT)
        climbed.append((size, level, written, transition, kept))
        written, transition = _join(written, transition)
    grad_carried = torch.zeros_like(carried)  # nothing reads what has been carried all the way
    grad_queries = grad_carried if carried is queries else torch.zeros_like(queries)
    grad_weights = torch.zeros_like(weights)
    grad_table = torch.zeros_like(written), torch.zeros_like(transition)
    for size, level, written, transition, kept in reversed(climbed):
        grad_table = _grads_of_join(written, transition, *grad_table)
        of_level = (x[..., level : level + 1] for x in (weights, grad_weights))
        readers = (queries, *of_level, grad_y, grad_queries, grad_carried)
        views = zip(
            kept,
            *(odd_runs(x, size) for x in readers),
            *(even_runs(x, num_chunks, size) for x in (written, transition, *grad_table)),
            strict=True,
        )
        for arrived, query, weight, grad_weight, grad, grad_query, grad_arrived, *table in views:
            seen, step, grad_seen, grad_step = table
            grad_step += _grad_of_step(step, arrived.mT, grad_arrived)
            onward = _carry(step, grad_arrived.mT).mT
            pulled = grad @ seen.mT
            if carried is queries:
                grad_seen += (arrived * weight).mT @ grad
                grad_weight += (pulled * arrived).sum(-1, keepdim=True)
                onward = pulled.mul_(weight).add_(onward)
            else:
                grad_seen += (query * (weight * arrived)).mT @ grad
                moved = (pulled * query).sum(-1, keepdim=True)
                grad_weight += moved * arrived
                grad_query.addcmul_(pulled, weight * arrived)
                onward = moved * weight + onward
            grad_arrived.copy_(onward)
    return grad_queries, *grad_table, grad_weights
