"""Gradients of queries, keys and gates of the causal branch (adjoint 12)."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.linear.triton.tiles import (
    gates_inside,
    load_column,
    load_mapped,
    load_state,
    load_tile,
    store_column,
    store_tile,
    tile_gates,
)
from smat.ops.triton.features import feature_derivative, load


@triton.jit
def query_key_grads(
    first_block, q, q_strides, k, k_strides, v, v_strides, key_gate, gate_strides,
    cum, cum_strides, grad_out, grad_strides, inverse, delta, answer_strides, chunks, windows,
    states, state_sums, adjoints, adjoint_sums, grad_q, grad_q_strides, grad_k, grad_k_strides,
    grad_gates, grad_gates_strides, grad_key_gate, grad_key_gate_strides,
    num_heads, num_chunks, num_visits,
    K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr, MAP: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Find the gradients at a chunk: with E = (grad_y v') * D, S before it and R behind it,

    grad_phi = exp(since) grad_y S' + E psi,   grad_psi = exp(until) v R' + E' phi,

    and that of the gates by four sums (`_decay_backward`): pairs of the tile, its queries with S,
    its keys with R, and what passes it, <S, R>. One block has some features of a chunk of one head
    of answers, and reads q, k, v, grad_out, S and R once for each tile of features; heads that
    share a query, a key or a gate each give their part. The torch form is `_chunks_backward`.
    """
    number = first_block + tl.program_id(0)
    k_block = number % tl.cdiv(K, BLOCK_K)
    number = number // tl.cdiv(K, BLOCK_K)
    chunk = number % num_chunks
    number = number // num_chunks
    head = number % num_heads
    batch = number // num_heads
    key_head, value_head = head // (GROUP * SHARE), head // GROUP
    start = tl.load(chunks + chunk * 4)
    size = tl.load(chunks + chunk * 4 + 1) - start
    first_window, last_window = tl.load(chunks + chunk * 4 + 2), tl.load(chunks + chunk * 4 + 3)
    features = k_block * BLOCK_K + tl.arange(0, BLOCK_K)
    slots = (batch * (num_heads // GROUP) + value_head).to(tl.int64) * num_visits + chunk
    own_slot = slots + tl.load(windows + first_window * 4 + 3)
    # The adjoint of a state is that of all who share it: the first of them takes it.
    num_features = tl.where(head % GROUP == 0, K, 0)
    pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
    by_query = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    by_key = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    passing = tl.zeros((BLOCK_K,), tl.float32)
    if inverse is not None:
        factor = load_column(inverse, answer_strides, batch, start, head, size, CHUNK)
        column = -factor * load_column(delta, answer_strides, batch, start, head, size, CHUNK)
        pairs += column[:, None]
        sums = load(state_sums + own_slot * K + features, features < K)
        by_query += column[:, None] * sums[None, :]
        for window in range(first_window, last_window + 1):
            at = (slots + tl.load(windows + window * 4 + 3)) * K + features
            adjoint_sum = load(adjoint_sums + at, features < num_features)
            passing += load(state_sums + at, features < num_features) * adjoint_sum
            by_key += adjoint_sum[None, :]
    for first in range(0, V, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        grad_y = load_tile(grad_out, grad_strides, batch, start, head, size, columns, CHUNK, V)
        if inverse is not None:
            grad_y *= factor[:, None]
        value = load_tile(v, v_strides, batch, start, value_head, size, columns, CHUNK, V)
        pairs = tl.dot(grad_y, tl.trans(value), pairs, input_precision=PRECISION)
        # States are read transposed.
        state = load_state(states, own_slot, features[None, :], columns[:, None], K, K, V)
        by_query = tl.dot(grad_y, state, by_query, input_precision=PRECISION)
        behind = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
        for window in range(first_window, last_window + 1):
            slot = slots + tl.load(windows + window * 4 + 3)
            adjoint = load_state(
                adjoints, slot, features[None, :], columns[:, None], num_features, K, V
            )
            behind += adjoint
            if cum is not None:
                state = load_state(
                    states, slot, features[None, :], columns[:, None], num_features, K, V
                )
                passing += tl.sum(state * adjoint, 0)
        by_key = tl.dot(value, behind, by_key, input_precision=PRECISION)
    since, until, over = tile_gates(cum, cum_strides, batch, value_head, start, size, CHUNK)
    by_query *= since[:, None]
    by_key *= until[:, None]
    pairs *= gates_inside(cum, cum_strides, batch, value_head, start, size, CHUNK)
    phi = load_mapped(q, q_strides, batch, start, head // SHARE, size, features, CHUNK, K, MAP)
    mapped = load_mapped(k, k_strides, batch, start, key_head, size, features, CHUNK, K, MAP)
    psi = mapped
    if key_gate is not None:
        gate = load_column(key_gate, gate_strides, batch, start, key_head, size, CHUNK)
        psi = mapped * gate[:, None]
    if grad_gates is not None:
        rows = tl.arange(0, CHUNK)
        moved = tl.dot(phi, tl.trans(psi), input_precision=PRECISION) * pairs
        moved = tl.where(rows[:, None] > rows[None, :], moved, 0.0)
        later = tl.sum(moved, 1) - tl.sum(moved, 0) + tl.sum(phi * by_query, 1)
        earlier = tl.sum(psi * by_key, 1)
        pulled = tl.cumsum(later, 0, reverse=True) + tl.cumsum(earlier, 0) - earlier
        store_column(
            grad_gates + k_block * grad_gates_strides[3], grad_gates_strides, batch, start, head,
            size, pulled + over * tl.sum(passing, 0), CHUNK,
        )  # fmt: skip
    by_query = tl.dot(pairs, psi, by_query, input_precision=PRECISION)
    by_query *= feature_derivative(phi, MAP)
    store_tile(grad_q, grad_q_strides, batch, start, head, size, features, by_query, CHUNK, K)
    by_key = tl.dot(tl.trans(pairs), phi, by_key, input_precision=PRECISION)
    if key_gate is not None:
        store_column(
            grad_key_gate + k_block * grad_key_gate_strides[3], grad_key_gate_strides, batch, start,
            head, size, tl.sum(mapped * by_key, 1), CHUNK,
        )  # fmt: skip
        by_key *= gate[:, None]
    by_key *= feature_derivative(mapped, MAP)
    store_tile(grad_k, grad_k_strides, batch, start, head, size, features, by_key, CHUNK, K)
