"""The division's part of the backward pass: o = y / s (Section 2)."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.linear.triton.tiles import inverse_or_zero, load_column, load_tile


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
    number = first_block + tl.program_id(0)
    head = number % num_heads
    number = number // num_heads
    start = (number % tl.cdiv(length, ROWS)).to(tl.int64) * ROWS
    batch = number // tl.cdiv(length, ROWS)
    size = tl.minimum(length - start, ROWS)
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, V, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        grad = load_tile(grad_out, grad_strides, batch, start, head, size, columns, ROWS, V)
        total += tl.sum(
            grad * load_tile(out, out_strides, batch, start, head, size, columns, ROWS, V), 1
        )
    sums = load_column(normalizer, normalizer_strides, batch, start, head, size, ROWS)
    rows = tl.arange(0, ROWS)
    place = (batch.to(tl.int64) * length + start + rows) * num_heads + head
    tl.store(inverse + place, inverse_or_zero(sums), mask=rows < size)
    tl.store(delta + place, total, mask=rows < size)
