"""The gated delta rule in chunks, forward and backward (appendix "Extension Details", GDN).

The arithmetic is in delta_chunks.py; here it becomes an operator that differentiates, compiles
with any length, and takes any mixture of dtypes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smat.ops.delta_chunks import DeltaChunks
from smat.ops.wy import check_gates, compute_dtype, full_precision

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
    check_shapes(q, k, beta, log_decay, chunk_size)
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must be (B, T, H, V) with k's B, T, H: {(*v.shape,)} / {(*k.shape,)}")
    expected = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != expected:
        raise ValueError(f"initial_state must be {expected}, not {(*initial_state.shape,)}")
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


def check_shapes(
    q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor | None, chunk_size: int
) -> None:
    """Refuse queries, keys and gates that do not belong together."""
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f"q and k must both be (B, T, H, K), not {(*q.shape,)} and {(*k.shape,)}")
    if k.shape[1] < 1:
        raise ValueError(f"a sequence needs at least one token, but k is {(*k.shape,)}")
    for name, gate in (("beta", beta), ("log_decay", log_decay)):
        if gate is not None and gate.shape != k.shape[:3]:
            raise ValueError(f"{name} must be (B, T, H) = {(*k.shape[:3],)}, not {(*gate.shape,)}")
    if chunk_size < 2 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two from 2 on, not {chunk_size}")


def run_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    scale: float | None,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """Run checked inputs; `v` None writes nothing, and the state is only multiplied."""
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    gates = torch.zeros_like(beta) if log_decay is None else log_decay
    given = (q, k, v, beta, gates, initial_state)
    needs_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    if k.shape[1] <= SHORT_CHUNK:
        chunk_size = min(chunk_size, SHORT_CHUNK)
    out, state, _ = _delta_rule(*given, scale, chunk_size, needs_grad)
    return out, state


@torch.library.custom_op("smat::delta_rule", mutates_args=())
@full_precision
def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    check_gates(log_decay)
    return DeltaChunks(q, k, v, beta, log_decay, initial_state, scale, chunk_size).forward(
        keep_states
    )


@torch.library.custom_op("smat::delta_rule_backward", mutates_args=())
@full_precision
def _delta_rule_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    states: Tensor,
    grad_out: Tensor | None,
    grad_final: Tensor | None,
    scale: float,
    chunk_size: int,
) -> list[Tensor]:
    chunks = DeltaChunks(q, k, v, beta, log_decay, initial_state, scale, chunk_size)
    return chunks.backward(states, grad_out, grad_final)


@_delta_rule.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    scale: float,
    chunk_size: int,
    keep_states: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, seq_len, heads, key_dim = k.shape
    value_like = initial_state if v is None else v
    assert value_like is not None
    value_dim = value_like.shape[-1]
    dtype = compute_dtype(q, k, v, initial_state)
    out = (k if v is None else v).new_empty(batch, seq_len, heads, value_dim)
    final = k.new_empty(batch, heads, key_dim, value_dim, dtype=dtype)
    num_chunks = (seq_len + chunk_size - 1) // chunk_size
    kept = (num_chunks + 1, batch * heads, key_dim, value_dim) if keep_states else (0,)
    return out, final, k.new_empty(kept, dtype=dtype)


@_delta_rule_backward.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor,
    log_decay: Tensor,
    initial_state: Tensor | None,
    states: Tensor,
    grad_out: Tensor | None,
    grad_final: Tensor | None,
    scale: float,
    chunk_size: int,
) -> list[Tensor]:
    given = [q, k, k[..., :0] if v is None else v, beta, log_decay]
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    batch, _, heads, key_dim = k.shape
    return [*grads, states.new_empty(batch, heads, key_dim, states.shape[-1])]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], output[2])
    ctx.scale, ctx.chunk_size = inputs[6:8]
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_out: Tensor | None, grad_final: Tensor | None, _: None
) -> tuple[Tensor | None, ...]:
    *given, states = ctx.saved_tensors
    grads = _delta_rule_backward(*given, states, grad_out, grad_final, ctx.scale, ctx.chunk_size)
    v, initial_state = given[2], given[5]
    initial = None if initial_state is None else grads[5].to(initial_state.dtype)
    return *grads[:2], None if v is None else grads[2], *grads[3:5], initial, None, None, None


_delta_rule.register_autograd(_backward, setup_context=_remember)
