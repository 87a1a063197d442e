"""The gated delta rule, and keys and queries carried to the boundary (extension appendix, GDN).

Everything but the states at the chunks' edges is batched over chunks, heads and batch; the backward
pass keeps the inputs and those states, and builds the tiles of a few chunks again at a time. What
is carried is read from a state that starts as the identity and is only multiplied. On a CPU, calls
of some size go to the kernels of `native/`, which keep and take the same states.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smat.ops.delta_rule import chunks
from smat.ops.delta_rule.chunks import WYTiles
from smat.ops.delta_rule.native import rule as native

SHORT_CHUNK = 16


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule over a sequence; without `log_decay` it is DeltaNet.

    >>> k = torch.eye(2).view(1, 2, 1, 2)  # two orthogonal keys, each written once
    >>> v = torch.tensor([[3.0], [5.0]]).view(1, 2, 1, 1)
    >>> out, state = delta_rule(k, k, v, torch.ones(1, 2, 1), scale=1.0, output_final_state=True)
    >>> out.flatten(), state.flatten()
    (tensor([3., 5.]), tensor([3., 5.]))

    S_t = a_t (I - beta_t k_t k_t') S_{t-1} + beta_t k_t v_t',   o_t = scale S_t' q_t.

    Shapes: q, k (B, T, H, K), v (B, T, H, V), beta and log_decay (B, T, H), states (B, H, K, V);
    `scale` is K^-1/2 unless given. A gate of -inf forgets everything; a token with beta 0 and
    log_decay 0 changes nothing. Sums run in fp32 or wider, and the state keeps that dtype.
    Paper: a_t = exp(log_decay), r = K, A_t = the transition of S above.
    """
    chunks.check_shapes(q, k, chunk_size, v=v, beta=beta, log_decay=log_decay)
    expected = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    if initial_state is None:
        initial_state = k.new_zeros(expected)
    elif initial_state.shape != expected:
        raise ValueError(f"initial_state must be {expected}, not {(*initial_state.shape,)}")
    out, state = _run(q, k, v, beta, log_decay, initial_state, scale, chunk_size)
    return out, state if output_final_state else None


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    state: Tensor,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one token: q, k (B, H, K), v (B, H, V), gates (B, H), state (B, H, K, V).

    >>> k = torch.tensor([[[1.0, 0.0]]])
    >>> v, beta, state = torch.tensor([[[2.0]]]), torch.ones(1, 1), torch.full((1, 1, 2, 1), 7.0)
    >>> out, state = delta_rule_step(k, k, v, beta, state=state, scale=1.0)
    >>> out.flatten(), state.flatten()
    (tensor([2.]), tensor([2., 7.]))
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    dtype = chunks.compute_dtype(q, k, v, state)
    wide = state.to(dtype)
    if log_decay is not None:
        wide = wide * log_decay.to(dtype).exp()[..., None, None]
    key = k.to(dtype)
    held = (wide * key.unsqueeze(-1)).sum(-2)
    change = beta.to(dtype).unsqueeze(-1) * (v.to(dtype) - held)
    wide = wide + key.unsqueeze(-1) * change.unsqueeze(-2)
    out = (wide * (q.to(dtype) * scale).unsqueeze(-1)).sum(-2)
    return out.to(v.dtype), wide


def transport_keys(
    k: Tensor, beta: Tensor, log_decay: Tensor | None = None, *, chunk_size: int = 64
) -> Tensor:
    """Carry what every token writes to the end of the sequence, (B, T, H, K) -> (B, T, H, K).

    >>> k = torch.eye(2)[[0, 1, 0]].view(1, 3, 1, 2)  # the third key erases half of the first
    >>> transport_keys(k, torch.full((1, 3, 1), 0.5)).view(3, 2)
    tensor([[0.2500, 0.0000],
            [0.0000, 0.5000],
            [0.5000, 0.0000]])

    transported_key_j = A_n ... A_{j+1} beta_j k_j,   A_t = exp(log_decay_t) (I - beta_t k_t k_t'),

    so that sum_j transported_key_j v_j' over the tokens of a profile is the profile's memory at the
    boundary. k (B, n, H, K) are the distant tokens only, beta and log_decay (B, n, H). The
    transitions are symmetric: seen backwards this is a query's transport, read one token late.
    Paper: k-bar_j = `transported_key`, n = the length of `k`.
    """
    chunks.check_shapes(k, k, chunk_size, beta=beta, log_decay=log_decay)
    writes = (k * beta.unsqueeze(-1).to(k.dtype)).flip(1)
    if k.shape[1] == 1:
        return writes
    gates = None if log_decay is None else log_decay[:, 1:].flip(1)
    carried, _ = _run(
        writes[:, 1:], k[:, 1:].flip(1), None, beta[:, 1:].flip(1), gates, _identity(k),
        1.0, chunk_size,
    )  # fmt: skip
    return torch.cat([writes[:, :1], carried], 1).flip(1)


def transport_queries(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_transition: Tensor | None = None,
    output_final_transition: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Carry every query back to the boundary, (B, T, H, K) -> (B, T, H, K).

    >>> k = torch.eye(2)[[0, 1]].view(1, 2, 1, 2)
    >>> q = torch.ones(1, 2, 1, 2)
    >>> transport_queries(q, k, torch.full((1, 2, 1), 0.5), scale=1.0)[0].view(2, 2)
    tensor([[0.5000, 1.0000],
            [0.5000, 0.5000]])

    transported_query_t = scale (A_t ... A_{n+1})' q_t,   scale = K^-1/2 unless given,

    so that transported_query_t' F reads a memory F that stood still at the boundary as if the
    transitions since had been applied to it. q, k (B, m, H, K) are the recent tokens only. The
    product A_t ... A_{n+1} (B, H, K, K), the final transition, is the whole decoding state.
    Paper: q-bar_t = `transported_query`, r = K.
    """
    chunks.check_shapes(q, k, chunk_size, beta=beta, log_decay=log_decay)
    start = _identity(k) if initial_transition is None else initial_transition
    expected = (k.shape[0], k.shape[2], k.shape[3], k.shape[3])
    if start.shape != expected:
        raise ValueError(f"initial_transition must be {expected}, not {(*start.shape,)}")
    queries, product = _run(q, k, None, beta, log_decay, start, scale, chunk_size)
    return queries, product if output_final_transition else None


def _identity(k: Tensor) -> Tensor:
    batch, _, heads, key_dim = k.shape
    eye = torch.eye(key_dim, dtype=k.dtype, device=k.device)
    return eye.expand(batch, heads, key_dim, key_dim)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor,
    scale: float | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Run checked inputs; `v` None writes nothing, and the state is only multiplied."""
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    values = k[..., :0] if v is None else v
    gates = torch.zeros_like(beta) if log_decay is None else log_decay
    if k.shape[1] <= SHORT_CHUNK:
        chunk_size = min(chunk_size, SHORT_CHUNK)
    given = (q, k, values, beta, gates, initial_state)
    if torch.is_grad_enabled():
        out, state, _ = chunks.recomputed(_forward, _backward, scale, chunk_size, *given)
    else:
        out, state, _ = _forward(list(given), scale, chunk_size, False)
    return out, state


def _tiles(given: Sequence[Tensor], scale: float, size: int, dtype: torch.dtype) -> WYTiles:
    q, k, beta, log_decay = (chunks.pack(given[i], size, dtype) for i in (0, 1, 3, 4))
    return WYTiles(q.mul_(scale), k, beta, log_decay)


@chunks.register_operator("smat::delta_rule")
def _forward(
    given: Sequence[Tensor], scale: float, chunk_size: int, keep_states: bool = True
) -> list[Tensor]:
    *by_token, initial_state = given
    k, v, log_decay = by_token[1], by_token[2], by_token[4]
    chunks.check_gates(log_decay)
    if native.takes(k, native.SOURCE):
        return native.forward(given, scale, chunk_size, keep_states)
    dtype = chunks.compute_dtype(*given[:3], initial_state)
    state = initial_state.to(dtype).flatten(0, 1)
    out = (v if v.shape[-1] else k).new_empty(*k.shape[:3], state.shape[-1])
    kept = [state.new_empty(0, *state.shape)]
    for tokens in chunks.token_ranges(k, chunk_size):
        tiles = _tiles([x[:, tokens] for x in by_token], scale, chunk_size, dtype)
        transition = tiles.transition().unflatten(0, (-1, len(state)))
        states = state.new_empty(len(transition) + 1, *state.shape)
        states[0] = state
        start = states[:-1].flatten(0, 1)
        if v.shape[-1]:
            values = chunks.pack(v[:, tokens], chunk_size, dtype).mul_(tiles.beta)
            update = torch.bmm(tiles.inverse, values)
            writes = torch.bmm(tiles.key_out.mT, update).view_as(states[1:])
            for i, write in enumerate(writes):
                torch.baddbmm(write, transition[i], states[i], out=states[i + 1])
            update.baddbmm_(tiles.erase, start, alpha=-1)
        else:
            for i, step in enumerate(transition):
                torch.bmm(step, states[i], out=states[i + 1])
            update = torch.bmm(tiles.erase, start).neg_()
        y = torch.bmm(tiles.reads, update).baddbmm_(tiles.query_in, start)
        chunks.unpack(y, out[:, tokens])
        state = states[-1]
        if keep_states:
            kept.append(states[:-1])
    return [out, state.clone().view(initial_state.shape), torch.cat(kept)]


@chunks.register_operator("smat::delta_rule_backward")
def _backward(tensors: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    *by_token, initial_state, kept, grad_out, grad_final = tensors
    if native.takes(by_token[1], native.BACKWARD_SOURCE):
        return native.backward(tensors, scale, chunk_size)
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in by_token]
    grad_state = grad_final.flatten(0, 1)
    for tokens in reversed(chunks.token_ranges(by_token[1], chunk_size)):
        given = [x[:, tokens] for x in by_token]
        tiles = _tiles(given, scale, chunk_size, kept.dtype)
        first, count = tokens.start // chunk_size, len(tiles.k) // len(grad_state)
        start = kept[first : first + count].flatten(0, 1)
        grad_y = chunks.pack(grad_out[:, tokens], chunk_size, kept.dtype)
        *found, grad_state = _tiles_backward(tiles, given[2], start, grad_y, grad_state)
        found[0].mul_(scale)
        for grad, some in zip(grads, found, strict=True):
            chunks.unpack(some, grad[:, tokens])
    return [*grads, grad_state.to(initial_state.dtype, copy=True).view(initial_state.shape)]


def _tiles_backward(
    tiles: WYTiles, v: Tensor, start: Tensor, grad_y: Tensor, grad_state: Tensor
) -> tuple[Tensor, ...]:
    """Find the gradients of q (scaled), k, v, beta, log_decay as tiles, and of the first state."""
    # U = (I + L)^-1 diag(beta) (V - K_in S_0), and what the outputs send to it.
    target = torch.bmm(tiles.key_in, start).neg_()
    if v.shape[-1]:
        target += chunks.pack(v, tiles.k.shape[1], target.dtype)
    update = torch.bmm(tiles.inverse, tiles.beta * target)
    grad_update = torch.bmm(tiles.reads.mT, grad_y)
    # The states' recurrence, transposed: grad S_0 = M' grad S_c + R' grad_y.
    received = torch.bmm(tiles.query_in.mT, grad_y)
    received.baddbmm_(tiles.erase.mT, grad_update, alpha=-1)
    transition = tiles.transition().unflatten(0, (-1, len(grad_state)))
    grad_states = grad_state.new_empty(len(transition) + 1, *grad_state.shape)
    received = received.view_as(grad_states[1:])
    grad_states[-1] = grad_state
    for i in reversed(range(len(transition))):
        torch.baddbmm(received[i], transition[i].mT, grad_states[i + 1], out=grad_states[i])
    grad_end = grad_states[1:].flatten(0, 1)
    grad_update.baddbmm_(tiles.key_out, grad_end)
    grad_input = torch.bmm(tiles.inverse.mT, grad_update)
    grad_v = tiles.beta * grad_input
    grad_q, grad_k, grad_beta, grad_gate = tiles.backward(
        grad_reads=torch.bmm(grad_y, update.mT),
        grad_lower=torch.bmm(grad_input, update.mT).neg_(),
        grad_query_in=torch.bmm(grad_y, start.mT),
        grad_key_in=torch.bmm(grad_v, start.mT).neg_(),
        grad_key_out=torch.bmm(update, grad_end.mT),
        grad_kept=(start * grad_end).sum((1, 2)),
    )
    grad_beta += (grad_input * target).sum(-1, keepdim=True)
    return grad_q, grad_k, grad_v[..., : v.shape[-1]], grad_beta, grad_gate, grad_states[0]


@_forward.register_fake
def _(given: Sequence[Tensor], scale: float, chunk_size: int, keep: bool = True) -> list[Tensor]:
    k, v, initial_state = given[1], given[2], given[5]
    dtype = chunks.compute_dtype(*given[:3], initial_state)
    out = (v if v.shape[-1] else k).new_empty(*k.shape[:3], initial_state.shape[-1])
    state = torch.empty_like(initial_state, dtype=dtype, memory_format=torch.contiguous_format)
    num_kept = (k.shape[1] + chunk_size - 1) // chunk_size if keep else 0
    return [out, state, state.new_empty(num_kept, len(k) * k.shape[2], *state.shape[2:])]


@_backward.register_fake
def _(tensors: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[:6]]
