"""States before chunks, and their adjoints behind them: a scan over each window (equation 8)."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.linear.triton.tiles import at_tokens, tile_gates
from smat.ops.triton.features import load, load_features


@triton.jit
def scan_states(
    first_block, left, left_strides, right, right_strides, scale, scale_strides,
    column, column_strides, cum, cum_strides, chunks, windows, states, state_sums,
    num_batch, num_heads, num_slots,
    K: tl.constexpr, V: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr,
    MAP: tl.constexpr, REVERSE: tl.constexpr, EVERY_VISIT: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store what a window knows before each chunk, or which gradient comes from behind it.

    Forwards   S <- exp(over) S + sum over j of exp(until_j) psi_j v_j',
    in reverse R <- exp(over) R + sum over i of exp(since_i) phi_i grad_y_i',

    and beside each its column of the normaliser. One block has a tile of one window's states, of
    one head of values, and goes through its chunks: keys and values are read once for each tile of
    a state's rows or columns, states written once. The torch form is `Tiles.states_before` and
    `Tiles.scan_backward`.
    """
    number = first_block + tl.program_id(0).to(tl.int64)
    v_block = number % tl.cdiv(V, BLOCK_V)
    number = number // tl.cdiv(V, BLOCK_V)
    k_block = number % tl.cdiv(K, BLOCK_K)
    number = number // tl.cdiv(K, BLOCK_K)
    head = number % num_heads
    batch = number // num_heads % num_batch
    window = windows + number // num_heads // num_batch * 4
    first, own, end, visits = (
        tl.load(window), tl.load(window + 1), tl.load(window + 2), tl.load(window + 3),
    )  # fmt: skip
    features = k_block * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK_K,), tl.float32)
    for step in range(end - first):
        chunk = end - 1 - step if REVERSE else first + step
        is_own = chunk >= own
        slot = (batch * num_heads + head) * num_slots + chunk
        stored = K  # features
        if EVERY_VISIT:
            slot += visits
        else:
            stored = tl.where(is_own, K, 0)
        place = states + (slot * K + features[:, None]) * V + columns[None, :]
        tl.store(place, state, mask=(features[:, None] < stored) & (columns[None, :] < V))
        if state_sums is not None:
            is_sum = features < tl.where(v_block == 0, stored, 0)
            tl.store(state_sums + slot * K + features, total, mask=is_sum)
        start, stop = tl.load(chunks + chunk * 4), tl.load(chunks + chunk * 4 + 1)
        rows = start + tl.arange(0, CHUNK)
        since, until, over = tile_gates(cum, cum_strides, batch, head, rows, start, stop)
        state *= over
        total *= over
        inside = rows < (tl.where(is_own, stop, start) if REVERSE else stop)
        for member in range(GROUP):
            answer = head * GROUP + member
            place = at_tokens(left, left_strides, batch, rows, answer // SHARE)
            is_left = inside[:, None] & (features[None, :] < K)
            x = load_features(place[:, None] + features[None, :], is_left, MAP)
            place = at_tokens(right, right_strides, batch, rows, answer)
            is_right = inside[:, None] & (columns[None, :] < V)
            y = load(place[:, None] + columns[None, :], is_right)
            weight = since if REVERSE else until
            if scale is not None:
                scale_head = answer if REVERSE else answer // SHARE
                weight *= load(at_tokens(scale, scale_strides, batch, rows, scale_head), inside)
            x *= weight[:, None]
            state = tl.dot(tl.trans(x), y, state, input_precision=PRECISION)
            if column is not None:
                place = at_tokens(column, column_strides, batch, rows, answer)
                x *= -load(place, inside)[:, None]
            total += tl.sum(x, 0)
