"""The gated delta rule in chunks and token by token (appendix "Extension Details", GDN).

`_run_chunks` is the whole algorithm, differentiable as it stands. Around it is an operator that
compiles with any length and, instead of what autograd would keep, keeps the inputs and some states:
its backward pass runs a few chunks again at a time, from the state they started with.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from smat.ops.delta_rule.chunks import (
    Recomputed,
    check_gates,
    check_shapes,
    chunks_at_once,
    compute_dtype,
    pack,
    register_operator,
    token_ranges,
    unpack,
    wy_products,
)

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

    The paper's a_t is exp(log_decay), r is K, A_t the transition of S above.
    """
    check_shapes(q, k, beta, log_decay, chunk_size, v=v)
    expected = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != expected:
        raise ValueError(f"initial_state must be {expected}, not {(*initial_state.shape,)}")
    if initial_state is None:
        initial_state = k.new_zeros(expected)
    out, state = run_delta_rule(q, k, v, beta, log_decay, initial_state, scale, chunk_size)
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
    dtype = compute_dtype(q, k, v, state)
    wide = state.to(dtype)
    if log_decay is not None:
        wide = wide * log_decay.to(dtype).exp()[..., None, None]
    key = k.to(dtype)
    held = (wide * key.unsqueeze(-1)).sum(-2)
    change = beta.to(dtype).unsqueeze(-1) * (v.to(dtype) - held)
    wide = wide + key.unsqueeze(-1) * change.unsqueeze(-2)
    out = (wide * (q.to(dtype) * scale).unsqueeze(-1)).sum(-2)
    return out.to(v.dtype), wide


def run_delta_rule(
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
        out, state, _ = Recomputed.apply(  # type: ignore[no-untyped-call]
            _forward, _backward, scale, chunk_size, *given
        )
    else:
        out, state, _ = _forward(list(given), scale, chunk_size, False)
    return out, state


def _run_chunks(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor,
    *,
    scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Run some chunks from a state (B, H, K, V), in its dtype: outputs and the state after them."""
    given = (q, k, v, beta.unsqueeze(-1), log_decay.unsqueeze(-1))
    tiles = [pack(x, chunk_size, state.dtype) for x in given]
    chunks = wy_products(tiles[0] * scale, *tiles[1:])
    written = chunks.written if v.shape[-1] else torch.zeros_like(chunks.erased[..., :1])
    running = state.flatten(0, 1)
    starts, updates = [], []
    in_order = (written, chunks.erased, chunks.key_out.mT, chunks.kept)
    for wrote, erase, key_out, kept in zip(*(x.unbind(1) for x in in_order), strict=True):
        starts.append(running)
        updates.append(torch.baddbmm(wrote, erase, running, alpha=-1))
        running = torch.baddbmm(kept * running, key_out, updates[-1])
    read = chunks.query_in @ torch.stack(starts, 1) + chunks.reads @ torch.stack(updates, 1)
    out = unpack(read, v if v.shape[-1] else k)
    return out, running.view(state.shape)


@register_operator("smat::delta_rule")
def _forward(
    given: Sequence[Tensor], scale: float, chunk_size: int, keep_states: bool = True
) -> list[Tensor]:
    *by_token, initial_state = given
    k, v, log_decay = by_token[1], by_token[2], by_token[4]
    check_gates(log_decay)
    state = initial_state.to(compute_dtype(*given[:3], initial_state))
    out = (v if v.shape[-1] else k).new_empty(*k.shape[:3], state.shape[-1])
    run = partial(_run_chunks, scale=scale, chunk_size=chunk_size)
    starts = []
    for tokens in token_ranges(k, chunk_size):
        if keep_states:
            starts.append(state)
        out[:, tokens], state = run(state, *(x[:, tokens] for x in by_token))
    return [out, state, torch.stack(starts, 1) if starts else state.new_empty(len(k), 0)]


@register_operator("smat::delta_rule_backward")
def _backward(given: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    *by_token, initial_state, starts, grad_out, grad_state = given
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in by_token]
    run = partial(_run_chunks, scale=scale, chunk_size=chunk_size)
    ranges = token_ranges(by_token[1], chunk_size)
    for tokens, start in reversed(list(zip(ranges, starts.unbind(1), strict=True))):
        pull = torch.func.vjp(run, start, *(x[:, tokens] for x in by_token))[1]
        grad_state, *found = pull((grad_out[:, tokens], grad_state))
        for grad, some in zip(grads, found, strict=True):
            grad[:, tokens] = some
    return [*grads, grad_state.to(initial_state.dtype, copy=True)]


@_forward.register_fake
def _(given: Sequence[Tensor], scale: float, chunk_size: int, keep: bool = True) -> list[Tensor]:
    k, v, initial_state = given[1], given[2], given[5]
    dtype = compute_dtype(*given[:3], initial_state)
    value_dim = initial_state.shape[-1]
    out = (v if v.shape[-1] else k).new_empty(*k.shape[:3], value_dim)
    state = torch.empty_like(initial_state, dtype=dtype, memory_format=torch.contiguous_format)
    size = chunk_size * chunks_at_once(k)
    num_kept = (k.shape[1] + size - 1) // size
    kept = (len(k), num_kept, *initial_state.shape[1:]) if keep else (len(k), 0)
    return [out, state, state.new_empty(kept)]


@_backward.register_fake
def _(given: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given[:6]]
