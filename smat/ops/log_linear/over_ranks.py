"""Log-linear attention over ranks: the buckets of a binary counter go from rank to rank.

Before a position p every earlier token s lies in bucket bit_length(p XOR s) - 1. A later query t
sees bucket b at level max(b + 1, bit_length(t XOR p)), and at a later position p' the bucket is
max(b, bit_length(p XOR p') - 1): buckets are merged, never taken apart. So they are the groups of a
scan over ranks. Levels among a rank's own tokens are those of the operator if the tokens begin at a
multiple of a large enough power of two: shares are cut there, and idle tokens stand in front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.distributed import Piece, Share
from smat.distributed.exchange import Carry, scan, without_autocast
from smat.ops.delta_rule import chunks, transport_keys, transport_queries
from smat.ops.linear.decay import FORGETS, decay_factor
from smat.ops.log_linear.log_linear import (
    LogLinearState,
    log_linear_attention,
    log_linear_delta_rule,
)


class LogLinearTokens(NamedTuple):
    """What both forms take, (B, T, H, ...); beta is that of the delta rule."""

    q: Tensor
    k: Tensor
    v: Tensor
    level_weights: Tensor
    log_decay: Tensor | None
    beta: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> LogLinearTokens:
        """Do the same to everything."""
        return LogLinearTokens(*(None if x is None else change(x) for x in self))  # type: ignore[arg-type]


def aligned_parts(start: int, stop: int) -> list[tuple[int, int, int]]:
    """Cut tokens so that levels count from the beginning of each part: start, stop, idle before it.

    >>> aligned_parts(5, 11), aligned_parts(8, 12), aligned_parts(9, 11)
    ([(5, 8, 1), (8, 11, 0)], [(8, 12, 0)], [(9, 10, 0), (10, 11, 0)])
    """
    middle = next(
        start + (-start % (1 << bit))
        for bit in reversed(range(stop.bit_length() + 1))
        if start + (-start % (1 << bit)) < stop
    )
    parts = [(middle, stop, 0)]
    if middle > start:
        size = 1 << (middle - start - 1).bit_length()
        parts.insert(0, (start, middle, size - (middle - start)))
    return parts


def _bucket(position: int, other: int, num_buckets: int) -> int:
    return min(max(0, (position ^ other).bit_length() - 1), num_buckets - 1)


def merge_buckets(start: int, stop: int, num_buckets: int) -> list[tuple[int, int]]:
    """Say which buckets at one position become which at a later one: pairs (later, earlier).

    >>> merge_buckets(3, 4, 4)
    [(2, 0), (2, 1), (2, 2), (3, 3)]
    """
    least = _bucket(start, stop, num_buckets)
    return [(max(bucket, least), bucket) for bucket in range(num_buckets)]


class _Part:
    """Some tokens of a rank: what they give alone, and what they do to the buckets before them."""

    def __init__(
        self, tokens: LogLinearTokens, bounds: tuple[int, int, int], **options: Any
    ) -> None:
        self.start, self.stop, idle = bounds
        self.num_buckets = max(1, tokens.level_weights.shape[-1] - 1)
        padded = tokens.each(lambda x: F.pad(x, (*[0, 0] * (x.ndim - 2), idle, 0)))
        out, wide = _alone(padded, **options), chunks.compute_dtype(tokens.k, tokens.v)
        scale, log_decay = options["scale"], tokens.log_decay
        if tokens.beta is None:
            gates = torch.zeros_like(tokens.v[..., 0]) if log_decay is None else log_decay
            gates = gates.double().clamp(min=FORGETS)
            later = F.pad(gates[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1)
            self.keys = tokens.k.to(wide) * decay_factor(later, wide).unsqueeze(-1)
            since = decay_factor(gates.cumsum(1), wide).unsqueeze(-1)  # (B, T, H, 1)
            self.queries = tokens.q.to(wide) * since * scale
            self.transition = since[:, -1].unsqueeze(-1)  # (B, H, 1, 1)
        else:
            size = options["chunk_size"]
            given = (tokens.k.to(wide), tokens.beta, log_decay)
            self.keys = transport_keys(*given, chunk_size=size)
            self.queries, product = transport_queries(
                tokens.q.to(wide), *given, scale=scale, output_final_transition=True,
                chunk_size=size,
            )  # fmt: skip
            assert product is not None
            self.transition = product
        self.out, self.v, self.weights = out[:, idle:], tokens.v.to(wide), tokens.level_weights
        self.merge = merge_buckets(self.start, self.stop, self.num_buckets)

    def written(self) -> Tensor:
        """Sum what the tokens write over the buckets at their end, (buckets, B, H, K, V)."""
        found = []
        for bit in range(self.num_buckets):
            top = self.stop >> bit << bit
            low = top - (self.stop & 1 << bit) if bit < self.num_buckets - 1 else 0
            own = slice(max(low - self.start, 0), max(top - self.start, 0))
            found.append(torch.einsum("bthk,bthv->bhkv", self.keys[:, own], self.v[:, own]))
        return torch.stack(found)

    def go_on(self, buckets: Tensor) -> Tensor:
        """Take the buckets before the tokens over them."""
        return Carry(self.written(), self.transition, self.merge, ()).go_on(buckets)

    def read(self, buckets: Tensor) -> Tensor:
        """Answer the queries by the buckets before them, and by the own tokens."""
        token = torch.arange(self.start, self.stop, device=buckets.device)
        bits = torch.arange(self.stop.bit_length(), device=buckets.device)
        above = ((token ^ self.start).unsqueeze(-1) >> bits > 0).sum(-1, keepdim=True)
        level = torch.maximum(above, torch.arange(1, self.num_buckets + 1, device=buckets.device))
        level = level.clamp(max=self.weights.shape[-1] - 1)[:, None].expand(
            *self.weights.shape[:-1], -1
        )
        weights = self.weights.to(buckets.dtype).gather(-1, level)
        seen = torch.einsum("bthk,lbhkv,bthl->bthv", self.queries, buckets, weights)
        return self.out + seen.to(self.out.dtype)


@without_autocast
def log_linear_over_ranks(
    tokens: LogLinearTokens, share: Share, rows: Sequence[Piece] | None = None, **options: Any
) -> tuple[Tensor, LogLinearState]:
    """Attend from a rank's own tokens to those of all ranks; the state is that after its own.

    Options are `scale` and `chunk_size`. `rows` says that rows are pieces of packed sequences: then
    the first one's buckets come in, and the last one's go on.
    """
    ends = (0, -1) if rows is not None and len(rows) > 1 else (0,)
    pieces = (
        [Piece(0, share.stop - share.start, share.start, share.total)] if rows is None else rows
    )
    sides = []
    for at in ends:
        some = slice(None) if rows is None else slice(at, at + 1 or None)
        sides.append(
            _cut_parts(tokens.each(partial(_take, slice(None), some)), pieces[at], options)
        )
    first, last = sides[0], sides[-1]
    zeros = torch.zeros_like(last[0].written())
    written, step = zeros, None
    for part in last:
        written = part.go_on(written)
        step = part.transition if step is None else _after(part.transition, step)
    merge: list[tuple[int, int]] = []
    if first is last and pieces[0].offset > 0:
        merge = merge_buckets(pieces[0].offset, pieces[0].end, len(zeros))
    (before,), link = scan([Carry(written, step, merge, tuple(zeros.shape))], share, written)
    before = before * (pieces[0].offset > 0)
    answers, buckets = [], before
    for part in first:
        answers.append(part.read(buckets))
        buckets = part.go_on(buckets)
    out = torch.cat(answers, 1) + link.to(tokens.v.dtype)
    if rows is not None and len(rows) > 1:
        out = F.pad(out, (0, 0, 0, 0, 0, tokens.v.shape[1] - out.shape[1]))
        others = tokens.each(lambda x: x[1:])
        out = torch.cat([out, _alone(others, **options)])
    count = torch.full((len(out),), pieces[-1].end, dtype=torch.long, device=out.device)
    return out, LogLinearState(buckets.movedim(0, 2), count)


def _cut_parts(tokens: LogLinearTokens, piece: Piece, options: dict[str, Any]) -> list[_Part]:
    parts = []
    for bounds in aligned_parts(piece.offset, piece.end):
        time = slice(bounds[0] - piece.offset, bounds[1] - piece.offset)
        parts.append(_Part(tokens.each(partial(_take, time, slice(None))), bounds, **options))
    return parts


def _take(time: slice, rows: slice, x: Tensor) -> Tensor:
    return x[rows, time]


def _after(later: Tensor, earlier: Tensor) -> Tensor:
    return later * earlier if later.shape[-1] == 1 else later @ earlier


def _alone(tokens: LogLinearTokens, **options: Any) -> Tensor:
    """Attend from sequences that begin on this rank."""
    q, k, v, weights, log_decay, beta = tokens
    if beta is None:
        return log_linear_attention(q, k, v, weights, log_decay, **options)[0]
    return log_linear_delta_rule(q, k, v, beta, weights, log_decay, **options)[0]
