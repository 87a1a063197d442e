"""Outputs of the op: tile, carried state, long range and the division (equation 8, line 8)."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.linear.triton.tiles import at_tokens, gates_inside, inverse_or_zero, tile_gates
from smat.ops.triton.features import load, load_features


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
    number = first_block + tl.program_id(0).to(tl.int64)
    v_block = number % tl.cdiv(V, BLOCK_V)
    number = number // tl.cdiv(V, BLOCK_V)
    chunk = number % num_chunks
    number = number // num_chunks
    head = number % num_heads
    batch = number // num_heads
    key_head, value_head = head // (GROUP * SHARE), head // GROUP
    start, stop = tl.load(chunks + chunk * 4), tl.load(chunks + chunk * 4 + 1)
    rows = start + tl.arange(0, CHUNK)
    inside = rows < stop
    columns = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    is_value = inside[:, None] & (columns[None, :] < V)
    y = tl.zeros((CHUNK, BLOCK_V), tl.float32)
    total = tl.zeros((CHUNK,), tl.float32)
    if LOCAL:
        slot = (batch * (num_heads // GROUP) + value_head) * num_chunks + chunk
        scores = tl.zeros((CHUNK, CHUNK), tl.float32)
        query = at_tokens(q, q_strides, batch, rows, head // SHARE)[:, None]
        key = at_tokens(k, k_strides, batch, rows, key_head)[:, None]
        for first in range(0, K, BLOCK_K):
            features = first + tl.arange(0, BLOCK_K)
            is_feature = inside[:, None] & (features[None, :] < K)
            phi = load_features(query + features[None, :], is_feature, MAP)
            psi = load_features(key + features[None, :], is_feature, MAP)
            scores = tl.dot(phi, tl.trans(psi), scores, input_precision=PRECISION)
            place = states + (slot * K + features[:, None]) * V + columns[None, :]
            state = load(place, (features[:, None] < K) & (columns[None, :] < V))
            y = tl.dot(phi, state, y, input_precision=PRECISION)
            if NORMALIZE:
                sums = load(state_sums + slot * K + features, features < K)
                total += tl.sum(phi * sums[None, :], 1)
        if key_gate is not None:
            gate = load(at_tokens(key_gate, gate_strides, batch, rows, key_head), inside)
            scores *= gate[None, :]
        since, _, _ = tile_gates(cum, cum_strides, batch, value_head, rows, start, stop)
        scores *= gates_inside(cum, cum_strides, batch, value_head, rows, stop)
        place = at_tokens(v, v_strides, batch, rows, value_head)[:, None] + columns[None, :]
        y = tl.dot(scores, load(place, is_value), y * since[:, None], input_precision=PRECISION)
        total = total * since + tl.sum(scores, 1)
    if far is not None:
        sees_far = rows >= first_far
        place = at_tokens(far, far_strides, batch, rows - first_far, head)[:, None]
        y += load(place + columns[None, :], is_value & sees_far[:, None])
        if NORMALIZE:
            place = at_tokens(far_sums, far_sums_strides, batch, rows - first_far, head)
            total += load(place, inside & sees_far)
    if NORMALIZE:
        place = at_tokens(normalizer, normalizer_strides, batch, rows, head)
        tl.store(place, total, mask=rows < tl.where(v_block == 0, stop, start))
        y *= inverse_or_zero(total)[:, None]
    place = at_tokens(out, out_strides, batch, rows, head)[:, None] + columns[None, :]
    tl.store(place, y, mask=is_value)
