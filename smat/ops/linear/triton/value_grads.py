"""Gradients of values of the causal branch (adjoint 12)."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.linear.triton.tiles import at_tokens, gates_inside, tile_gates
from smat.ops.triton.features import load, load_features


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
    number = first_block + tl.program_id(0).to(tl.int64)
    v_block = number % tl.cdiv(V, BLOCK_V)
    number = number // tl.cdiv(V, BLOCK_V)
    chunk = number % num_chunks
    number = number // num_chunks
    value_head = number % num_heads
    batch = number // num_heads
    key_head = value_head // SHARE
    start, stop = tl.load(chunks + chunk * 4), tl.load(chunks + chunk * 4 + 1)
    own_window, last_window = tl.load(chunks + chunk * 4 + 2), tl.load(chunks + chunk * 4 + 3)
    rows = start + tl.arange(0, CHUNK)
    inside = rows < stop
    columns = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = inside[:, None] & (columns[None, :] < V)
    gate = tl.where(inside, 1.0, 0.0)
    if key_gate is not None:
        gate = load(at_tokens(key_gate, gate_strides, batch, rows, key_head), inside)
    _, until, _ = tile_gates(cum, cum_strides, batch, value_head, rows, start, stop)
    key = at_tokens(k, k_strides, batch, rows, key_head)[:, None]
    pulled = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    slots = (batch * num_heads + value_head) * num_visits + chunk
    for first in range(0, K, BLOCK_K):
        features = first + tl.arange(0, BLOCK_K)
        is_state = (features[:, None] < K) & (columns[None, :] < V)
        psi = load_features(key + features[None, :], inside[:, None] & (features[None, :] < K), MAP)
        behind = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
        for window in range(own_window, last_window + 1):
            slot = slots + tl.load(windows + window * 4 + 3)
            place = adjoints + (slot * K + features[:, None]) * V + columns[None, :]
            behind += load(place, is_state)
        pulled = tl.dot(psi, behind, pulled, input_precision=PRECISION)
    pulled *= (until * gate)[:, None]
    left = gates_inside(cum, cum_strides, batch, value_head, rows, stop)
    for member in range(GROUP):
        head = value_head * GROUP + member
        query = at_tokens(q, q_strides, batch, rows, head // SHARE)[:, None]
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in range(0, K, BLOCK_K):
            features = first + tl.arange(0, BLOCK_K)
            is_feature = inside[:, None] & (features[None, :] < K)
            phi = load_features(query + features[None, :], is_feature, MAP)
            psi = load_features(key + features[None, :], is_feature, MAP)
            scores = tl.dot(psi, tl.trans(phi), scores, input_precision=PRECISION)
        scores *= tl.trans(left) * gate[:, None]
        place = at_tokens(grad_out, grad_strides, batch, rows, head)[:, None] + columns[None, :]
        grad_y = load(place, is_value)
        if inverse is not None:
            answer = at_tokens(inverse, answer_strides, batch, rows, head)
            grad_y *= load(answer, inside)[:, None]
        pulled = tl.dot(scores, grad_y, pulled, input_precision=PRECISION)
    place = at_tokens(grad_v, grad_v_strides, batch, rows, value_head)[:, None] + columns[None, :]
    tl.store(place, pulled, mask=is_value)
