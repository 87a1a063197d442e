"""The long-range branch on a GPU: pool by profile, tabulate, read by type (equation 6, adjoint 11).

The torch form, which says how gates and moving boundaries enter, is `smat.ops.smat.long_range`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from smat.masks import Segment, SMatMask
from smat.ops.linear.decay import FORGETS
from smat.ops.smat.long_range import decay_backward
from smat.ops.smat.routing import Inputs, Options
from smat.ops.smat.triton.folds import Folds, multiply, new_empty
from smat.ops.smat.triton.read import count_parts, pull, read
from smat.ops.smat.triton.tokens import Side


def long_range(
    inputs: Inputs,
    options: Options,
    mask: SMatMask,
    segments: Sequence[Segment],
    cum: Tensor | None,
) -> tuple[int, Tensor, Tensor | None]:
    """Let queries see the distant keys on their hyperplanes; the first that does, and y, z from it.

    y (B, T - first, H, V) are the numerators, z (B, T - first, H) the normalisers, if there are
    any; `cum` (2, B, rows, T + 1) the sums of gates, None if the long range does not decay.
    """
    folds = Folds(inputs, options, mask, segments, cum)
    size = folds.num_batch, folds.length - folds.first, folds.num_heads, folds.reads
    y = new_empty(inputs.v, *size, inputs.v.shape[-1])
    z = new_empty(inputs.v, *size) if options.normalize else None
    for first_row, num_rows in folds.cut_rows():
        for fold, table in folds.type_tables(first_row, num_rows):
            read(fold.by_type, folds.queries, table, y, z, first_row, folds.first, add=False)
    return folds.first, _sum_reads(y, 3), None if z is None else _sum_reads(z, 3)


def long_range_backward(
    inputs: Inputs,
    options: Options,
    mask: SMatMask,
    segments: Sequence[Segment],
    cum: Tensor | None,
    grad_out: Tensor,
    inverse: Tensor | None,
    delta: Tensor | None,
    grads: dict[str, Tensor],
) -> None:
    """Add to the gradients, by name, what the long range gives: fp32, of all tokens.

    The gradient of a numerator is `grad_out` times `inverse`, that of a normaliser -`delta` times
    `inverse`, (B, T, H) each; without a division both are None.
    """
    folds = Folds(inputs, options, mask, segments, cum)
    keys, queries = folds.keys, folds.queries
    queries = queries._replace(
        right=grad_out,
        scale=multiply(inverse, queries.scale),
        last=None if delta is None else delta.contiguous(),
    )
    by_query = by_key = None
    if cum is not None or queries.weight is not None:
        by_query = _new_dots(queries, folds.reads)
    if keys.scale is not None:
        by_key = _new_dots(keys, 1)
    grad_q = _Sum(grads["q"], folds.first, folds.length, folds.num_heads, folds.reads)
    grad_k = _Sum(grads["k"], 0, folds.num_distant, folds.num_rows, 1)
    grad_v = grads["v"].unsqueeze(3)
    pulling = keys._replace(scale=None, weight=keys.scale)
    for first_row, num_rows in folds.cut_rows():
        for fold, table in folds.type_tables(first_row, num_rows):
            pull(fold.by_type, queries, table, grad_q.parts, by_query, first_row,
                 grad_q.start, add=grad_q.direct)  # fmt: skip
        for fold, table in folds.profile_grads(queries, first_row, num_rows):
            read(fold.by_profile, keys, table, grad_v, None, first_row, add=True)
            pull(fold.by_profile, pulling, table, grad_k.parts, by_key, first_row,
                 add=grad_k.direct)  # fmt: skip
    grad_q.finish()
    grad_k.finish()
    _weights_backward(folds, inputs, by_query, by_key, grads)


def _weights_backward(
    folds: Folds,
    inputs: Inputs,
    by_query: Tensor | None,
    by_key: Tensor | None,
    grads: dict[str, Tensor],
) -> None:
    """Add the gradients of gates and weights: each is what its token takes part in, but for it."""
    if by_query is not None:
        by_query = by_query.sum(-1)
        if folds.queries.weight is not None:
            grads["read_weight"] += by_query.view_as(grads["read_weight"])
            by_query = by_query * folds.queries.weight.view_as(by_query)
    if by_key is None:
        return
    by_key = by_key.sum((-1, -2))
    distant = slice(0, folds.num_distant)
    gate, weight, left = folds.key_gate, folds.write_weight, folds.until_boundary
    if gate is not None:
        moved = _times(by_key, weight, left)[:, distant]
        grads["key_gate"][:, distant] += _sum_reads(moved.unflatten(2, (inputs.k.shape[2], -1)), 3)
    if weight is not None:
        grads["write_weight"][:, distant] += _times(by_key, gate, left)[:, distant]
    if left is not None:
        assert by_query is not None
        assert inputs.gates.log_decay is not None
        asked = by_query.sum(-1).unflatten(2, (folds.num_rows, -1)).sum(-1)
        took = _times(by_key, folds.keys.scale).transpose(1, 2)
        moved = decay_backward(
            asked.transpose(1, 2).flatten(0, 1), took.flatten(0, 1), folds.num_distant
        )
        moved = moved.view_as(took).transpose(1, 2)
        grads["log_decay"] += moved.masked_fill(inputs.gates.log_decay <= FORGETS, 0.0)


class _Sum:
    """Where visits leave gradients: the gradient itself if a token has one, else a row a visit."""

    def __init__(self, grad: Tensor, start: int, stop: int, num_heads: int, reads: int) -> None:
        self.grad, self.tokens = grad, slice(start, stop)
        self.direct = num_heads == grad.shape[2] and reads == 1
        self.start = 0 if self.direct else start
        self.parts = grad.unsqueeze(3)
        if not self.direct:
            size = len(grad), stop - start, num_heads, reads, grad.shape[-1]
            self.parts = new_empty(grad, *size)

    def finish(self) -> None:
        """Add the rows up."""
        if not self.direct:
            by_head = self.parts.flatten(2, 3).unflatten(2, (self.grad.shape[2], -1))
            self.grad[:, self.tokens] += by_head.sum(3)


def _new_dots(side: Side, reads: int) -> Tensor:
    """Make room for a number a visit and part of its vector; 0 where there is no visit."""
    heads = side.right.shape[2]
    size = *side.left.shape[:2], heads, reads, count_parts(side)
    return torch.zeros(size, dtype=torch.float32, device=side.left.device)


def _sum_reads(x: Tensor, dim: int) -> Tensor:
    return x.squeeze(dim) if x.shape[dim] == 1 else x.sum(dim)


def _times(x: Tensor, *factors: Tensor | None) -> Tensor:
    return reduce(torch.mul, (factor for factor in factors if factor is not None), x)
