"""States before chunks, and their adjoints behind them: a scan over each window (equation 8)."""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.linear.triton.tiles import load_column, load_mapped, load_tile, tile_gates


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
    number = first_block + tl.program_id(0)
    v_block = number % tl.cdiv(V, BLOCK_V)
    number = number // tl.cdiv(V, BLOCK_V)
    k_block = number % tl.cdiv(K, BLOCK_K)
    number = number // tl.cdiv(K, BLOCK_K)
    head = number % num_heads
    batch = number // num_heads % num_batch
    window = windows + number // num_heads // num_batch * 4
    first, own = tl.load(window), tl.load(window + 1)
    end, visits = tl.load(window + 2), tl.load(window + 3)
    features = k_block * BLOCK_K + tl.arange(0, BLOCK_K)
    columns = v_block * BLOCK_V + tl.arange(0, BLOCK_V)
    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    total = tl.zeros((BLOCK_K,), tl.float32)
    for step in range(end - first):
        chunk = end - 1 - step if REVERSE else first + step
        slot = (batch * num_heads + head).to(tl.int64) * num_slots + chunk
        num_features = K  # that are stored
        if EVERY_VISIT:
            slot += visits
        else:
            num_features = tl.where(chunk >= own, K, 0)
        is_state = (features[:, None] < num_features) & (columns[None, :] < V)
        tl.store(states + slot * K * V + features[:, None] * V + columns[None, :], state, is_state)
        if state_sums is not None:
            is_sum = features < tl.where(v_block == 0, num_features, 0)
            tl.store(state_sums + slot * K + features, total, is_sum)
        start = tl.load(chunks + chunk * 4)
        size = tl.load(chunks + chunk * 4 + 1) - start
        since, until, over = tile_gates(cum, cum_strides, batch, head, start, size, CHUNK)
        state *= over
        total *= over
        if REVERSE:
            size = tl.where(chunk >= own, size, 0)  # others have no query that looks through it
        for member in range(GROUP):
            asked = head * GROUP + member
            x = load_mapped(
                left, left_strides, batch, start, asked // SHARE, size, features, CHUNK, K, MAP
            )
            y = load_tile(right, right_strides, batch, start, asked, size, columns, CHUNK, V)
            weight = since if REVERSE else until
            if scale is not None:
                of_head = asked if REVERSE else asked // SHARE
                weight *= load_column(scale, scale_strides, batch, start, of_head, size, CHUNK)
            x *= weight[:, None]
            state = tl.dot(tl.trans(x), y, state, input_precision=PRECISION)
            if column is not None:
                x *= -load_column(column, column_strides, batch, start, asked, size, CHUNK)[:, None]
            total += tl.sum(x, 0)
