"""The division's part of the backward pass: o = y / s (Section 2)."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.linear.triton.tiles import at_tokens, inverse_or_zero
from smat.ops.triton.features import load


@triton.jit
def prepare_division(
    first_block, grad_out, grad_strides, out, out_strides, normalizer, normalizer_strides,
    inverse, delta, length, num_heads,
    V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Find 1 / s (or 0) and grad_out . o, both contiguous (B, T, H).

    The gradient of y is grad_out / s, that of s is -(grad_out . o) / s. Both tensors are read once.
    The torch form is `divide_backward`.
    """
    number = first_block + tl.program_id(0).to(tl.int64)
    head = number % num_heads
    number = number // num_heads
    rows = number % tl.cdiv(length, ROWS) * ROWS + tl.arange(0, ROWS)
    batch = number // tl.cdiv(length, ROWS)
    inside = rows < length
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, V, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        is_value = inside[:, None] & (columns[None, :] < V)
        place = at_tokens(grad_out, grad_strides, batch, rows, head)[:, None] + columns[None, :]
        grad = load(place, is_value)
        place = at_tokens(out, out_strides, batch, rows, head)[:, None] + columns[None, :]
        total += tl.sum(grad * load(place, is_value), 1)
    answer = (batch * length + rows) * num_heads + head
    sums = load(at_tokens(normalizer, normalizer_strides, batch, rows, head), inside)
    tl.store(inverse + answer, inverse_or_zero(sums), mask=inside)
    tl.store(delta + answer, total, mask=inside)
