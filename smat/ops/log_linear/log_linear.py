"""Log-linear attention: a state for every power of two of the past (baseline of the paper).

Tokens t >= s have level bit_length(t XOR s), 0 on the diagonal, and the output weighs every level
by a weight of the query's own. Chunked in O(T log T) work, decoded with O(log T) states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.ops.delta_rule import chunks, transport_keys
from smat.ops.linear.decay import FORGETS
from smat.ops.log_linear import tree


class LogLinearState(NamedTuple):
    """Decoding state: one bucket (B, H, L-1, K, V) for each bit of the number of tokens read.

    A binary counter: bucket b holds the 2^b tokens that bit b of `num_tokens` (B,) stands for, or
    0; the last holds everything older.
    """

    buckets: Tensor
    num_tokens: Tensor

    @classmethod
    def empty(
        cls, batch: int, heads: int, num_levels: int, key_dim: int, value_dim: int, **factory: Any
    ) -> LogLinearState:
        """Start from nothing; `factory` takes dtype and device."""
        buckets = torch.zeros(batch, heads, max(1, num_levels - 1), key_dim, value_dim, **factory)
        return cls(buckets, torch.zeros(batch, dtype=torch.long, device=buckets.device))


def log_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    output_final_state: bool = False,
    lengths: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, LogLinearState | None]:
    """Attend with scalar decay and a weight per level (the Mamba-2 form).

    >>> ones, weights = torch.ones(1, 3, 1, 1), torch.tensor([1.0, 10.0, 100.0]).expand(1, 3, 1, 3)
    >>> log_linear_attention(ones, ones, ones, weights)[0].flatten()  # token 2 sees 2, then {0, 1}
    tensor([  1.,  11., 201.])

    y_t = scale sum over s <= t of w_t[level(t, s)] exp(G_t - G_s) (q_t . k_s) v_s,   G = cumsum(g).

    Shapes: q, k (B, T, H, K), v (B, T, H, V), level_weights (B, T, H, L), log_decay g (B, T, H).
    All levels are there when T <= 2^(L-1); beyond, the last weight serves every level above it.
    The final state is that after `lengths` (B,) tokens if given: what follows them must be idle,
    with log_decay 0 (and beta 0).
    """
    chunks.check_shapes(q, k, chunk_size, v=v, level_weights=level_weights, log_decay=log_decay)
    gates = k.new_zeros(k.shape[:3]) if log_decay is None else log_decay
    given = (q, k, v, level_weights, gates)
    out, _ = chunks.recomputed(_forward, _backward, scale, chunk_size, *given)
    if not output_final_state:
        return out, None
    later = F.pad(gates[:, 1:].double().clamp(min=FORGETS), (0, 0, 0, 1))
    decay = later.flip(1).cumsum(1).flip(1).exp().to(chunks.compute_dtype(k, v))
    return out, _final_state(k * decay.unsqueeze(-1), v, level_weights, lengths)


def log_linear_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    level_weights: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    output_final_state: bool = False,
    lengths: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, LogLinearState | None]:
    """Attend with delta-rule transitions and a weight per level (the Gated DeltaNet form).

    >>> ones, weights = torch.ones(1, 3, 1, 1), torch.tensor([1.0, 10.0, 100.0]).expand(1, 3, 1, 3)
    >>> beta = torch.full((1, 3, 1), 0.5)  # every token halves what was there and adds a half
    >>> log_linear_delta_rule(ones, ones, ones, beta, weights)[0].flatten()
    tensor([ 0.5000,  3.0000, 38.0000])

    y_t = scale sum over s <= t of w_t[level(t, s)] beta_s (q_t' A_t ... A_{s+1} k_s) v_s,
    A_t = exp(g_t) (I - beta_t k_t k_t').

    Shapes as for `log_linear_attention`, beta (B, T, H).
    """
    by_token = {"v": v, "level_weights": level_weights, "beta": beta, "log_decay": log_decay}
    chunks.check_shapes(q, k, chunk_size, **by_token)
    gates = torch.zeros_like(beta) if log_decay is None else log_decay
    given = (q, k, v, level_weights, gates, beta)
    out, _ = chunks.recomputed(_forward, _backward, scale, chunk_size, *given)
    if not output_final_state:
        return out, None
    keys = transport_keys(k.to(chunks.compute_dtype(k, v)), beta, log_decay, chunk_size=chunk_size)
    return out, _final_state(keys, v, level_weights, lengths)


def log_linear_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    log_decay: Tensor | None = None,
    *,
    beta: Tensor | None = None,
    state: LogLinearState,
    scale: float = 1.0,
) -> tuple[Tensor, LogLinearState]:
    """Take one token: q, k (B, H, K), v (B, H, V), level_weights (B, H, L), gates (B, H).

    >>> one, weights = torch.ones(1, 1, 1), torch.tensor([[[1.0, 10.0, 100.0]]])
    >>> state = LogLinearState.empty(1, 1, 3, 1, 1)
    >>> for _ in range(3):
    ...     out, state = log_linear_step(one, one, one, weights, state=state)
    >>> out.item()
    201.0

    With `beta` a transition is exp(g) (I - beta k k'), without it exp(g). Rows may have read
    different numbers of tokens.
    """
    dtype = chunks.compute_dtype(q, k, v, state.buckets)
    buckets, key, write = state.buckets.to(dtype), k.to(dtype), k.to(dtype)
    if log_decay is not None:
        buckets = buckets * log_decay.to(dtype).exp()[..., None, None, None]
    if beta is not None:
        write = key * beta.to(dtype).unsqueeze(-1)
        held = torch.einsum("bhk,bhlkv->bhlv", key, buckets)
        buckets = buckets - torch.einsum("bhk,bhlv->bhlkv", write, held)
    own = torch.einsum("bhk,bhv->bhkv", write, v.to(dtype))
    weights = level_weights.to(dtype)
    num_buckets = buckets.shape[2]
    older = weights[..., 1:] if weights.shape[-1] > 1 else weights
    query = q.to(dtype) * scale
    seen = torch.einsum("bhl,bhlkv->bhkv", older, buckets) + weights[..., :1, None] * own
    out = torch.einsum("bhk,bhkv->bhv", query, seen)

    bits = state.num_tokens.unsqueeze(-1) >> torch.arange(num_buckets - 1, device=q.device) & 1
    carried = F.pad(bits.cumprod(-1), (0, 1)).to(dtype)
    landing = F.one_hot(carried.sum(-1).long(), num_buckets).to(dtype)
    carry = own + torch.einsum("bl,bhlkv->bhkv", carried, buckets)
    kept = buckets * (1 - carried)[:, None, :, None, None]
    buckets = kept + torch.einsum("bl,bhkv->bhlkv", landing, carry)
    return out.to(v.dtype), LogLinearState(buckets, state.num_tokens + 1)


def _final_state(
    keys: Tensor, v: Tensor, level_weights: Tensor, lengths: Tensor | None
) -> LogLinearState:
    """Sum keys already carried to the end, times values, over the bits of every row's length."""
    batch, seq_len = keys.shape[:2]
    values = v.to(keys.dtype)
    num_buckets = max(1, level_weights.shape[-1] - 1)
    buckets = []
    if lengths is None:
        lengths = torch.full((batch,), seq_len, dtype=torch.long, device=keys.device)
        stop = seq_len
        for bit in range(num_buckets):
            start = 0 if bit == num_buckets - 1 else stop - (seq_len & (1 << bit))
            tokens = slice(start, stop)
            buckets.append(torch.einsum("bthk,bthv->bhkv", keys[:, tokens], values[:, tokens]))
            stop = start
    else:
        if lengths.shape != (batch,):
            raise ValueError(f"lengths must be (B,) = ({batch},), not {(*lengths.shape,)}")
        token, length = torch.arange(seq_len, device=keys.device), lengths.unsqueeze(-1)
        bits = torch.arange(1, num_buckets, device=keys.device)
        bucket = ((length ^ token).unsqueeze(-1) >> bits > 0).sum(-1)
        for bit in range(num_buckets):
            chosen = keys * ((bucket == bit) & (token < length))[..., None, None]
            buckets.append(torch.einsum("bthk,bthv->bhkv", chosen, values))
    return LogLinearState(torch.stack(buckets, 2), lengths.long())


def _tiles(
    given: Sequence[Tensor], tokens: slice, scale: float, chunk_size: int
) -> tuple[tree.DecayTiles | tree.DeltaTiles, Tensor]:
    """Summarise the chunks of some tokens; their weights come along, both as tiles."""
    dtype = chunks.compute_dtype(*given[:4])
    q, k, v, weights, *gates = (chunks.pack(x[:, tokens], chunk_size, dtype) for x in given)
    form = tree.DecayTiles if len(gates) == 1 else tree.DeltaTiles
    return form(q.mul_(scale), k, v, *gates), weights


def _by_head(found: Sequence[tuple[Tensor, ...]], k: Tensor) -> Iterator[Tensor]:
    """Lay tiles of all ranges (chunks B H, ...) side by side, (B H, chunks, ...)."""
    shape = (-1, k.shape[0] * k.shape[2])
    for tiles in zip(*found, strict=True):
        yield torch.cat([x.unflatten(0, shape).transpose(0, 1) for x in tiles], 1)


@chunks.register_operator("smat::log_linear")
def _forward(given: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    k, v = given[1:3]
    chunks.check_gates(given[4])
    found = []
    for tokens in chunks.token_ranges(k, chunk_size):
        tiles, weights = _tiles(given, tokens, scale, chunk_size)
        y = torch.bmm(tree.spread_levels(weights).mul_(tiles.inner), tiles.writes)
        found.append((y, tiles.queries, tiles.written, tiles.transition, weights))
    y, *summaries = _by_head(found, k)
    tree.add_reads(y, *summaries)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    chunks.unpack(y.transpose(0, 1).flatten(0, 1), out)
    return [out, y.new_empty(len(k), 0)]


@chunks.register_operator("smat::log_linear_backward")
def _backward(tensors: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    """Build the tree again, carry gradients down it, and build a few chunks again at a time."""
    *given, _, grad_out = tensors
    ranges = chunks.token_ranges(given[1], chunk_size)
    found = []
    for tokens in ranges:
        tiles, weights = _tiles(given, tokens, scale, chunk_size)
        grad_y = chunks.pack(grad_out[:, tokens], chunk_size, weights.dtype)
        found.append((grad_y, tiles.queries, tiles.written, tiles.transition, weights))
    grad_y, *summaries = _by_head(found, given[1])
    grad_summaries = (grad_y, *tree.grads_of_reads(grad_y, *summaries))
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
    for tokens in ranges:
        tiles, weights = _tiles(given, tokens, scale, chunk_size)
        own = slice(tokens.start // chunk_size, tokens.stop // chunk_size)
        grad_y, *grad_summary, grad_weights = (
            x[:, own].transpose(0, 1).flatten(0, 1) for x in grad_summaries
        )
        spread = tree.spread_levels(weights)
        grad_inner = torch.bmm(grad_y, tiles.writes.mT)
        grad_weights += tree.gather_levels(grad_inner * tiles.inner, weights.shape[-1])
        grad_inner.mul_(spread)
        grad_writes = torch.bmm(spread.mul_(tiles.inner).mT, grad_y)
        grad_q, *others = tiles.backward(grad_inner, grad_writes, *grad_summary)
        ordered = (grad_q.mul_(scale), *others[:2], grad_weights, *others[2:])
        for grad, some in zip(grads, ordered, strict=True):
            chunks.unpack(some, grad[:, tokens])
    return grads


@_forward.register_fake
def _(given: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    out = torch.empty_like(given[2], memory_format=torch.contiguous_format)
    return [out, out.new_empty(len(out), 0, dtype=chunks.compute_dtype(*given[:4]))]


@_backward.register_fake
def _(tensors: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[:-2]]
