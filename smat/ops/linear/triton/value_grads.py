"""Gradients of values of the causal branch (adjoint 12)."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.linear.triton.tiles import (
    gates_inside,
    load_column,
    load_mapped,
    load_state,
    load_tile,
    store_tile,
    tile_gates,
)


@triton.jit
def value_grads(
    first_block, q, q_strides, k, k_strides, key_gate, gate_strides, cum, cum_strides,
    grad_out, grad_strides, inverse, answer_strides, chunks, windows, adjoints,
    grad_v, grad_v_strides, num_heads, num_chunks, num_visits,
    K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, MAP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Find the gradient of a chunk's values: grad_v = (phi psi' * D)' grad_y + exp(until) psi R.

    One block has some columns of a chunk of one head of values, goes through the heads of queries
    that share it, and reads q, k, grad_out and R once for each tile of columns. The torch form is
    `_chunks_backward`.
    """
    number = first_block + tl.program_id(0)
    v_block = number % tl.cdiv(V, BLOCK_V)
    number = number // tl.cdiv(V, BLOCK_V)
    chunk = number % num_chunks
    number = number // num_chunks
    value_head = number % num_heads
    batch = number // num_heads
    key_head = value_head // SHARE
    start = tl.load(chunks + chunk * 4)
    size = tl.load(chunks + chunk * 4 + 1) - start
    first_window, last_window = tl.load(chunks + chunk * 4 + 2), tl.load(chunks + chunk * 4 + 3)
    columns = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    _, gate, _ = tile_gates(cum, cum_strides, batch, value_head, start, size, CHUNK)
    if key_gate is not None:
        own = load_column(key_gate, gate_strides, batch, start, key_head, size, CHUNK)
        gate *= own
    pulled = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    slots = (batch * num_heads + value_head).to(tl.int64) * num_visits + chunk
    for first in range(0, K, BLOCK_K):
        features = first + tl.arange(0, BLOCK_K)
        behind = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
        for window in range(first_window, last_window + 1):
            slot = slots + tl.load(windows + window * 4 + 3)
            behind += load_state(adjoints, slot, features[:, None], columns[None, :], K, K, V)
        psi = load_mapped(k, k_strides, batch, start, key_head, size, features, CHUNK, K, MAP)
        pulled = tl.dot(psi, behind, pulled, input_precision=PRECISION)
    pulled *= gate[:, None]
    for member in range(GROUP):
        head = value_head * GROUP + member
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in range(0, K, BLOCK_K):
            features = first + tl.arange(0, BLOCK_K)
            phi = load_mapped(
                q, q_strides, batch, start, head // SHARE, size, features, CHUNK, K, MAP
            )
            psi = load_mapped(k, k_strides, batch, start, key_head, size, features, CHUNK, K, MAP)
            scores = tl.dot(phi, tl.trans(psi), scores, input_precision=PRECISION)
        scores *= gates_inside(cum, cum_strides, batch, value_head, start, size, CHUNK)
        if key_gate is not None:
            scores *= own[None, :]
        grad_y = load_tile(grad_out, grad_strides, batch, start, head, size, columns, CHUNK, V)
        if inverse is not None:
            factor = load_column(inverse, answer_strides, batch, start, head, size, CHUNK)
            grad_y *= factor[:, None]
        pulled = tl.dot(tl.trans(scores), grad_y, pulled, input_precision=PRECISION)
    store_tile(grad_v, grad_v_strides, batch, start, value_head, size, columns, pulled, CHUNK, V)
