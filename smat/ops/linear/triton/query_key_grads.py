"""Gradients of queries, keys and gates of the causal branch (adjoint 12)."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.linear.triton.tiles import at_tokens, gates_inside, tile_gates
from smat.ops.triton.features import feature_derivative, load, load_features


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
    its keys with R, and what passes it, <S, R>. One block has some features of a chunk of one key
    head, goes through the heads that share it, and reads q, k, v, grad_out, S and R once for each
    tile of features. The torch form is `_chunks_backward`.
    """
    number = first_block + tl.program_id(0).to(tl.int64)
    k_block = number % tl.cdiv(K, BLOCK_K)
    number = number // tl.cdiv(K, BLOCK_K)
    chunk = number % num_chunks
    number = number // num_chunks
    key_head = number % num_heads
    batch = number // num_heads
    start, stop = tl.load(chunks + chunk * 4), tl.load(chunks + chunk * 4 + 1)
    own_window, last_window = tl.load(chunks + chunk * 4 + 2), tl.load(chunks + chunk * 4 + 3)
    rows = start + tl.arange(0, CHUNK)
    inside = rows < stop
    features = k_block * BLOCK_K + tl.arange(0, BLOCK_K)
    is_feature = inside[:, None] & (features[None, :] < K)
    place = at_tokens(k, k_strides, batch, rows, key_head)[:, None] + features[None, :]
    mapped = load_features(place, is_feature, MAP)
    psi = mapped
    if key_gate is not None:
        gate = load(at_tokens(key_gate, gate_strides, batch, rows, key_head), inside)
        psi = mapped * gate[:, None]
    pulled_phi = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    pulled_psi = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    pulled_gates = tl.zeros((CHUNK,), tl.float32)
    for member in range(GROUP * SHARE):
        head = key_head * (GROUP * SHARE) + member
        value_head = head // GROUP
        # The adjoint of a state is that of all who share it: the first of them takes it.
        num_features = tl.where(head % GROUP == 0, K, 0)
        slots = (batch * (num_heads * SHARE) + value_head) * num_visits + chunk
        place = at_tokens(q, q_strides, batch, rows, head // SHARE)[:, None] + features[None, :]
        phi = load_features(place, is_feature, MAP)
        answer = at_tokens(0, answer_strides, batch, rows, head)
        factor = tl.where(inside, 1.0, 0.0)
        column = tl.zeros((CHUNK,), tl.float32)
        if inverse is not None:
            factor = load(inverse + answer, inside)
            column = -load(delta + answer, inside) * factor
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32) + column[:, None]
        by_query = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        by_key = tl.zeros((CHUNK, BLOCK_K), tl.float32)
        passing = tl.zeros((BLOCK_K,), tl.float32)
        for first in range(0, V, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            is_value = inside[:, None] & (columns[None, :] < V)
            is_state = (columns[:, None] < V) & (features[None, :] < K)
            within = features[None, :] * V + columns[:, None]  # states are read transposed
            place = at_tokens(grad_out, grad_strides, batch, rows, head)[:, None]
            grad_y = load(place + columns[None, :], is_value) * factor[:, None]
            place = at_tokens(v, v_strides, batch, rows, value_head)[:, None] + columns[None, :]
            value = load(place, is_value)
            pairs = tl.dot(grad_y, tl.trans(value), pairs, input_precision=PRECISION)
            own_slot = slots + tl.load(windows + own_window * 4 + 3)
            state = load(states + own_slot * K * V + within, is_state)
            by_query = tl.dot(grad_y, state, by_query, input_precision=PRECISION)
            behind = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
            for window in range(own_window, last_window + 1):
                slot = slots + tl.load(windows + window * 4 + 3)
                is_adjoint = is_state & (features[None, :] < num_features)
                adjoint = load(adjoints + slot * K * V + within, is_adjoint)
                if cum is not None:
                    state = load(states + slot * K * V + within, is_state)
                    passing += tl.sum(state * adjoint, 0)
                behind += adjoint
            by_key = tl.dot(value, behind, by_key, input_precision=PRECISION)
        if inverse is not None:
            own_slot = slots + tl.load(windows + own_window * 4 + 3)
            sums = load(state_sums + own_slot * K + features, features < K)
            by_query += column[:, None] * sums[None, :]
            for window in range(own_window, last_window + 1):
                slot = slots + tl.load(windows + window * 4 + 3)
                adjoint = load(adjoint_sums + slot * K + features, features < num_features)
                sums = load(state_sums + slot * K + features, features < K)
                passing += sums * adjoint
                by_key += adjoint[None, :]
        since, until, over = tile_gates(cum, cum_strides, batch, value_head, rows, start, stop)
        by_query *= since[:, None]
        by_key *= until[:, None]
        pairs *= gates_inside(cum, cum_strides, batch, value_head, rows, stop)
        if grad_gates is not None:
            moved = tl.dot(phi, tl.trans(psi), input_precision=PRECISION) * pairs
            moved = tl.where(rows[:, None] > rows[None, :], moved, 0.0)
            later = tl.sum(moved, 1) - tl.sum(moved, 0) + tl.sum(phi * by_query, 1)
            earlier = tl.where(inside, tl.sum(psi * by_key, 1), 0.0)
            pulled_gates += tl.cumsum(later, 0, reverse=True) + tl.cumsum(earlier, 0) - earlier
            pulled_gates += over * tl.sum(passing, 0)
            if head % GROUP == GROUP - 1:
                place = at_tokens(grad_gates, grad_gates_strides, batch, rows, value_head)
                tl.store(place + k_block * grad_gates_strides[3], pulled_gates, mask=inside)
                pulled_gates = tl.zeros((CHUNK,), tl.float32)
        pulled_phi += tl.dot(pairs, psi, by_query, input_precision=PRECISION)
        pulled_psi += tl.dot(tl.trans(pairs), phi, by_key, input_precision=PRECISION)
        if head % SHARE == SHARE - 1:
            place = at_tokens(grad_q, grad_q_strides, batch, rows, head // SHARE)[:, None]
            pulled_phi *= feature_derivative(phi, MAP)
            tl.store(place + features[None, :], pulled_phi, mask=is_feature)
            pulled_phi = tl.zeros((CHUNK, BLOCK_K), tl.float32)
    if key_gate is not None:
        place = at_tokens(grad_key_gate, grad_key_gate_strides, batch, rows, key_head)
        place += k_block * grad_key_gate_strides[3]
        tl.store(place, tl.sum(mapped * pulled_psi, 1), mask=inside)
        pulled_psi *= gate[:, None]
    place = at_tokens(grad_k, grad_k_strides, batch, rows, key_head)[:, None] + features[None, :]
    tl.store(place, pulled_psi * feature_derivative(mapped, MAP), mask=is_feature)
