"""Outputs of the op: tile, carried state, long range and the division (equation 8, line 8)."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.linear.triton.tiles import (
    gates_inside,
    inverse_or_zero,
    load_column,
    load_mapped,
    load_state,
    load_tile,
    store_column,
    store_tile,
    tile_gates,
)
from smat.ops.triton.features import load


@triton.jit
def attend_chunks(
    first_block, q, q_strides, k, k_strides, v, v_strides, key_gate, gate_strides,
    cum, cum_strides, chunks, states, state_sums, far, far_strides, far_sums, far_sums_strides,
    first_far, out, out_strides, normalizer, normalizer_strides, num_heads, num_chunks,
    K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr,
    MAP: tl.constexpr, LOCAL: tl.constexpr, NORMALIZE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from a chunk of queries: y = exp(since) phi S + (phi psi' * D) v + far, o = y / s.

    One block has some columns of one chunk of one head. It reads q, k, v, the state and the long
    range once, and writes the output and its normaliser once. The torch form is `causal`, then
    `attend`.
    """
    number = first_block + tl.program_id(0)
    v_block = number % tl.cdiv(V, BLOCK_V)
    number = number // tl.cdiv(V, BLOCK_V)
    chunk = number % num_chunks
    number = number // num_chunks
    head = number % num_heads
    batch = number // num_heads
    key_head, value_head = head // (GROUP * SHARE), head // GROUP
    start = tl.load(chunks + chunk * 4)
    size = tl.load(chunks + chunk * 4 + 1) - start
    columns = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    y = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    if LOCAL:
        slot = (batch * (num_heads // GROUP) + value_head).to(tl.int64) * num_chunks + chunk
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        for first in range(0, K, BLOCK_K):
            features = first + tl.arange(0, BLOCK_K)
            phi = load_mapped(
                q, q_strides, batch, start, head // SHARE, size, features, CHUNK, K, MAP
            )
            psi = load_mapped(k, k_strides, batch, start, key_head, size, features, CHUNK, K, MAP)
            scores = tl.dot(phi, tl.trans(psi), scores, input_precision=PRECISION)
            state = load_state(states, slot, features[:, None], columns[None, :], K, K, V)
            y = tl.dot(phi, state, y, input_precision=PRECISION)
            if NORMALIZE:
                sums = load(state_sums + slot * K + features, features < K)
                total += tl.sum(phi * sums[None, :], 1)
        if key_gate is not None:
            gate = load_column(key_gate, gate_strides, batch, start, key_head, size, CHUNK)
            scores *= gate[None, :]
        since, _, _ = tile_gates(cum, cum_strides, batch, value_head, start, size, CHUNK)
        scores *= gates_inside(cum, cum_strides, batch, value_head, start, size, CHUNK)
        value = load_tile(v, v_strides, batch, start, value_head, size, columns, CHUNK, V)
        y = tl.dot(scores, value, y * since[:, None], input_precision=PRECISION)
        total = total * since + tl.sum(scores, 1)
    if far is not None:  # which all tokens of a chunk see, or none
        first_seen, seen = start - first_far, tl.where(start >= first_far, size, 0)
        y += load_tile(far, far_strides, batch, first_seen, head, seen, columns, CHUNK, V)
        if NORMALIZE:
            total += load_column(far_sums, far_sums_strides, batch, first_seen, head, seen, CHUNK)
    if NORMALIZE:
        stored = tl.where(v_block == 0, size, 0)
        store_column(normalizer, normalizer_strides, batch, start, head, stored, total, CHUNK)
        y *= inverse_or_zero(total)[:, None]
    store_tile(out, out_strides, batch, start, head, size, columns, y, CHUNK, V)
