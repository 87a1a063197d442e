"""The causal branch: chunk sums, an exclusive scan, dense tiles (equation 8, adjoint 12).

Within a recent window,

    y_i = phi_i . S_in[b] + sum over j <= i of the chunk of (phi_i . psi_j) v_j,
    S_in[b] = sum over the window's earlier chunks of D_a,   D_a = sum over j in a of psi_j v_j',

and with gates every term carries exp(lambda_i - lambda_j), taken apart at the chunk's edges.

A few chunks are worked off at a time, so that their tiles stay in cache. The scan over them is one
product with a lower-triangular matrix, ones or decay factors. A window may begin before the queries
that look through it: the states of all windows that have begun are carried along. The backward pass
finds the states before all chunks again, from the keys alone, and goes through them in reverse.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from smat.masks import Segment
from smat.ops.linear.chunks import (
    Chunks,
    Tiles,
    add_product_,
    cut_chunks,
    cut_queries,
    join_queries,
    max_chunks,
    sum_heads,
)
from smat.ops.linear.decay import LogDecay


class OpenWindows:
    """The states (N, M, r, p) of the windows that have begun, by their boundary."""

    def __init__(
        self, segments: Sequence[Segment], psi: Tensor, v: Tensor, initial: Tensor | None = None
    ) -> None:
        self.begins = {segment.boundary for segment in segments}
        self.zero = v.new_zeros(*v.shape[:2], psi.shape[-1], v.shape[-1])
        self.states = {segments[0].boundary: self.zero if initial is None else initial}

    def enter(self, chunks: Chunks) -> Tensor:
        """Open and close what begins and ends here, and return the state of the chunks' window."""
        if chunks.start in self.begins:
            self.states.setdefault(chunks.start, self.zero)
        self.states = {edge: x for edge, x in self.states.items() if edge >= chunks.boundary}
        return self.states[chunks.boundary]

    def pass_over(self, tiles: Tiles, sums: Tensor) -> None:
        """Carry all windows over the chunks."""
        self.states = {edge: tiles.state_behind(sums, x) for edge, x in self.states.items()}


def causal(
    phi: Tensor,
    psi: Tensor,
    v: Tensor,
    decay: LogDecay | None,
    segments: Sequence[Segment],
    initial: Tensor | None = None,
) -> Tensor:
    """Let every query see the recent keys of its segment's window: y (N, G M, T, p).

    >>> one = torch.ones(1, 1, 3, 1)
    >>> causal(one, one[0], one.cumsum(2), None, [Segment(0, 2, 0), Segment(2, 3, 1)]).flatten()
    tensor([1., 3., 5.])

    phi (N, G, T, r), psi (N, T, r), v (N, M, T, p), sums of gates (N, M, T + 1): G heads of queries
    share a key, or M heads of values share a key and a query. ``initial`` (N, M, r, p) is the state
    of the first window before the first token, if it began earlier.

    Paper: D_b = ``chunk_sums``, S_in = what ``scan`` finds before each chunk.
    """
    y = v.new_empty(len(v), phi.shape[1] * v.shape[1], *v.shape[2:])
    windows = OpenWindows(segments, psi, v, initial)
    for chunks in cut_chunks(segments, max_chunks(v)):
        tiles, queries = Tiles(chunks, psi, v, decay), cut_queries(phi, chunks)
        sums, state = tiles.chunk_sums(), windows.enter(chunks)
        answer = tiles.since_start(torch.matmul(queries, tiles.states_before(sums, state)))
        add_product_(answer, tiles.scores(queries), tiles.v)
        y[:, :, chunks.start : chunks.stop] = join_queries(answer, phi.shape[1])
        windows.pass_over(tiles, sums)
    return y


class CausalGrads(NamedTuple):
    """Gradients of the arguments of `causal` at some tokens; of the gates if there were any."""

    tokens: slice
    phi: Tensor  # (N, G, t, r)
    psi: Tensor  # (N, t, r)
    v: Tensor  # (N, M, t, p)
    log_decay: Tensor | None  # (N, M, t)


def causal_backward(
    phi: Tensor,
    psi: Tensor,
    v: Tensor,
    decay: LogDecay | None,
    segments: Sequence[Segment],
    grad_y: Tensor,
) -> Iterator[CausalGrads]:
    """Yield the gradients of `causal`, given that of its answers, (N, G M, T, p).

    They come for some tokens at a time, none of which stand on both sides of a boundary.
    """
    windows, passed = OpenWindows(segments, psi, v), []
    for chunks in cut_chunks(segments, max_chunks(v)):
        tiles = Tiles(chunks, psi, v, decay)
        sums, state = tiles.chunk_sums(), windows.enter(chunks)
        passed.append((chunks, tiles.states_before(sums, state), dict(windows.states)))
        windows.pass_over(tiles, sums)
    grad_windows: dict[int, Tensor] = {}
    while passed:
        chunks, before, in_front = passed.pop()
        tiles, queries = Tiles(chunks, psi, v, decay), cut_queries(phi, chunks)
        pulled = cut_queries(grad_y, chunks, phi.shape[1])
        yield _chunks_backward(tiles, queries, before, in_front, pulled, grad_windows)
        grad_windows.pop(chunks.start, None)  # what begins here began with nothing


def _chunks_backward(
    tiles: Tiles,
    phi: Tensor,
    before: Tensor,
    in_front: dict[int, Tensor],
    grad_y: Tensor,
    grad_windows: dict[int, Tensor],
) -> CausalGrads:
    """Find the gradients of some chunks, and bring those of the windows in front of them."""
    psi, v, boundary, grad_gates = tiles.psi, tiles.v, tiles.chunks.boundary, None
    at_start = tiles.since_start(grad_y)
    grad_before = torch.matmul(phi.mT, at_start)
    grad_windows.setdefault(boundary, torch.zeros_like(in_front[boundary]))
    grad_sums, passing = torch.zeros_like(grad_before), v.new_zeros(grad_before.shape[:3])
    for edge, grad in grad_windows.items():
        mine = edge == boundary
        pulled, grad_windows[edge] = tiles.scan_backward(grad_before if mine else None, grad)
        grad_sums += pulled
        if tiles.decay is not None:
            states = before if mine else tiles.states_before(tiles.chunk_sums(), in_front[edge])
            passing += (states * pulled).flatten(3).sum(-1)
    grad_scores, scores = torch.matmul(grad_y, v.mT), tiles.scores(phi)
    grad_v = torch.matmul(psi, grad_sums)
    grad_phi = torch.matmul(at_start, before.mT)
    if tiles.decay is not None:
        grad_v *= tiles.decay.until_end
        by_query, by_key = (phi * grad_phi).sum(-1), (v * grad_v).sum(-1)
        grad_gates = _decay_backward(tiles, scores * grad_scores, by_query, by_key, passing)
    grad_scores = sum_heads(tiles.weigh_(grad_scores))
    grad_phi = add_product_(sum_heads(grad_phi), grad_scores, psi)
    grad_psi = sum_heads(torch.matmul(tiles.v_at_end, grad_sums.mT))
    add_product_(grad_psi, grad_scores.mT, phi)
    return CausalGrads(
        slice(tiles.chunks.start, tiles.chunks.stop),
        join_queries(grad_phi, phi.shape[3] // psi.shape[3]),
        grad_psi.flatten(1, 3),
        add_product_(grad_v, scores.mT, grad_y).flatten(2, 3),
        grad_gates,
    )


def _decay_backward(
    tiles: Tiles, pairs: Tensor, by_query: Tensor, by_key: Tensor, passing: Tensor
) -> Tensor:
    """Find the gradient of the log-gates of the chunks' tokens, (N, M, C t).

    A gate is moved by every pair of a key before it and a query not before it. Four sums hold them
    all: pairs within the chunk (its tile without the diagonal: a token does not decay itself), its
    queries with the state before it, its keys with what comes behind it, and the states that pass
    it. None is a difference of sums over the whole sequence, so gates of -10 keep their digits.
    """
    size = tiles.psi.shape[3]
    pairs = pairs.unflatten(3, (-1, size)).sum(3).tril_(-1)
    later = pairs.sum(-1) - pairs.sum(-2) + by_query.unflatten(3, (-1, size)).sum(3)
    earlier = by_key.cumsum(-1) - by_key
    left = tiles.between.diagonal(-1, 1, 2).view(by_key.shape[:3])  # of what passes a chunk
    later = later.flip(-1).cumsum(-1).flip(-1)
    return (later + earlier + (left * passing).unsqueeze(-1)).flatten(2)
