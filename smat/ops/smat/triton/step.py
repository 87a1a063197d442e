"""One token of decoding in one launch: write, recurrent update, read, normalise (Algorithm 3).

The torch form is `smat.ops.smat.step`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from smat.ops.triton.features import load, load_features


@triton.jit
def add_to_state(state, at, inside, left, new):
    """Multiply a part of a state by what is left of it, add to it, and return it."""
    tile = tl.load(state + at, mask=inside, other=0.0) * left + new
    tl.store(state + at, tile, mask=inside)
    return tile


@triton.jit
def left_since(total, lost, pair, inside):
    """exp(lambda - lambda then), of pairs of fp64 numbers that add up to each."""
    gone = total - tl.load(pair, mask=inside, other=0.0)
    gone += lost - tl.load(pair + 1, mask=inside, other=0.0)
    return tl.exp(tl.minimum(gone, 0.0)).to(tl.float32)


@triton.jit
def step_kernel(
    first_block, q, k, v, log_decay, key_gate, write_weight, profile, query_type, read_weight,
    recent, profile_table, type_table, lam, edge_lam, profile_lam, place, out,
    num_rows, num_profiles, num_types, first_type, q_row, q_head, k_row, k_head, v_row, v_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr, GATE_HEADS: tl.constexpr, READS: tl.constexpr, SLOTS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, MAP: tl.constexpr, NORMALIZE: tl.constexpr,
    LOCAL: tl.constexpr, BG: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Take in one token of one head of one batch row, and answer the queries of its group.

        R = exp(g) R + psi v'            F[x] = exp(lambda - lambda then) F[x] + w psi v'
        y = phi' R + exp(lambda - lambda_n) sum_j w_j phi' U[type_j],  divided by its last column

    ``place`` (B, H, 4): the position, the slot of F (-1: nothing is written), the slot of the
    window, the buffer of U (-1: nothing is read). Bytes of a program, with 4 r p for a state: R is
    read and written in every slot, F[x] once, U[type] is read for every query and read of it;
    beside them the token, the answers, 40 bytes of ``place``, and 32 or 64 of lambda.
    """
    row = first_block + tl.program_id(0).to(tl.int64)  # of num_rows = B H
    b, h = row // HEADS, row % HEADS
    seat = place + row * 4
    position, slot = tl.load(seat), tl.load(seat + 1)
    window, buffer = tl.load(seat + 2), tl.load(seat + 3)
    tl.store(seat, position + 1)
    writes, reads = slot >= 0, buffer >= 0
    P: tl.constexpr = V + NORMALIZE
    SIZE: tl.constexpr = K * P

    left, since, kept = 1.0, 1.0, 1.0  # of R, of U, of F[x]
    if log_decay is not None:
        gate = tl.maximum(tl.load(log_decay + row).to(tl.float64), -1000.0)
        left = tl.exp(gate).to(tl.float32)
    if lam is not None:
        total, lost = tl.load(lam + row * 2), tl.load(lam + row * 2 + 1)
        if log_decay is not None:
            summed = total + gate
            lost += gate - (summed - total)
            total = summed
            tl.store(lam + row * 2, total)
            tl.store(lam + row * 2 + 1, lost)
        since = left_since(total, lost, edge_lam + (window * num_rows + row) * 2, reads)
    if profile_table is not None:
        point = position % num_profiles
        if profile is not None:
            point = tl.load(profile + row).to(tl.int64)
        entry = (slot * num_rows + row) * num_profiles + point
        if profile_lam is not None:
            kept = left_since(total, lost, profile_lam + entry * 2, writes)
            tl.store(profile_lam + entry * 2, total, mask=writes)
            tl.store(profile_lam + entry * 2 + 1, lost, mask=writes)
    strength, far = 1.0, 1.0
    if key_gate is not None:
        strength = load(key_gate + b * GATE_HEADS + h * GATE_HEADS // HEADS, True)
    if write_weight is not None:
        far = load(write_weight + row, True)

    g, column = tl.arange(0, BG), tl.arange(0, BV)
    head = h * GROUP + g  # of queries
    q_from = q + b * q_row + head * Q_HEADS // (HEADS * GROUP) * q_head
    k_from = k + b * k_row + h * K_HEADS // HEADS * k_head
    value = load(v + b * v_row + h * V_HEADS // HEADS * v_head + column, column < V)
    y, z = tl.zeros([BG, BV], tl.float32), tl.zeros([BG], tl.float32)
    for start in range(0, K, BK):
        part = start + tl.arange(0, BK)
        real, asked = part < K, (g < GROUP)[:, None] & (part < K)[None, :]
        psi = load_features(k_from + part, real, MAP) * strength
        phi = load_features(q_from[:, None] + part[None, :], asked, MAP)
        at, ones = part[:, None] * P + column[None, :], part * P + V
        inside = real[:, None] & (column < V)[None, :]
        new = psi[:, None] * value[None, :]
        seen, weight = tl.zeros([BK, BV], tl.float32), tl.zeros([BK], tl.float32)
        for each in tl.static_range(SLOTS):
            state = recent + (each * num_rows + row) * SIZE
            tile = add_to_state(state, at, inside, left, new)
            seen = tl.where(window == each, tile, seen)
            if NORMALIZE:
                sums = add_to_state(state, ones, real, left, psi)
                weight = tl.where(window == each, sums, weight)
        if LOCAL:
            y += tl.sum(phi[:, :, None] * seen[None, :, :], axis=1)
            z += tl.sum(phi * weight[None, :], axis=1)
        if profile_table is not None:
            if writes:
                state = profile_table + entry * SIZE
                add_to_state(state, at, inside, kept, far * new)
                if NORMALIZE:
                    add_to_state(state, ones, real, kept, far * psi)
        if type_table is not None:
            if reads:
                first = (buffer * num_rows + row) * num_types
                for j in range(READS):
                    asks = (b * HEADS * GROUP + head) * READS + j
                    due = phi * since
                    if query_type is None:
                        kind = tl.zeros([BG], tl.int64) + (position + first_type) % num_types
                    else:
                        kind = tl.load(query_type + asks, mask=g < GROUP, other=0).to(tl.int64)
                    if read_weight is not None:
                        due *= load(read_weight + asks, g < GROUP)[:, None]
                    read = type_table + (first + kind[:, None]) * SIZE
                    several = asked[:, :, None] & inside[None, :, :]
                    entries = load(read[:, :, None] + at[None, :, :], several)
                    y += tl.sum(due[:, :, None] * entries, axis=1)
                    if NORMALIZE:
                        z += tl.sum(due * load(read + ones[None, :], asked), axis=1)
    if NORMALIZE:
        nothing = tl.abs(z) < 1.1754943508222875e-38
        y = tl.where(nothing[:, None], 0.0, y / tl.where(nothing, 1.0, z)[:, None])
    to = out + (b * HEADS * GROUP + head)[:, None] * V + column[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=(g < GROUP)[:, None] & (column < V)[None, :])
