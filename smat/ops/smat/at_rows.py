"""Attend from a few queries: the rows of the mask, written out.

Pooling moves T states into tables before anyone reads; R rows against all keys are R T products of
width K and V, which is less as long as R is below about K V / (K + V), and has far fewer parts. So
this is the way for a task that asks at a few positions of short sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smat.masks import SMatMask
from smat.ops.feature_maps import repeat_heads
from smat.ops.linear.decay import LogDecay
from smat.ops.smat.arguments import check_values
from smat.ops.smat.routing import Gates, Options, Routing

MAX_ROWS = 64
MAX_SCORES = 1 << 24  # (B, H, R, T) weights are held for the backward pass


def is_few(q: Tensor, k: Tensor) -> bool:
    """Tell whether queries (B, R, H, K) are few enough against keys (B, T, H, K)."""
    batch, num_rows, heads = q.shape[:3]
    return num_rows <= MAX_ROWS and batch * num_rows * heads * k.shape[1] <= MAX_SCORES


def attend_few(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    routing: Routing,
    positions: Tensor,
    options: Options,
    neighbours: Sequence[Routing] = (),
) -> Tensor:
    """Return the output of queries (B, R, H, K) at positions (R,): (B, R, H, V), fp32 or wider.

    >>> mask = SMatMask(seq_len=8, vc_dim=2, chunk_size=2, field_size=2)
    >>> q, k, v = torch.ones(1, 1, 1, 1), torch.ones(1, 8, 1, 1), torch.eye(8).view(1, 8, 1, 8)
    >>> plain = Options(mask, "identity", normalize=False)
    >>> attend_few(q, k, v, Gates(), Routing(), torch.tensor([6]), plain).flatten()
    tensor([0., 1., 0., 1., 1., 1., 1., 0.])

    What tokens write to `neighbours`, by other profiles and weights, is read in the same products.
    """
    mask, positions, num_heads = options.mask, positions.long(), max(q.shape[2], v.shape[2])
    # Types are here at the positions alone, which are checked beside them.
    check_values(gates, routing, None, positions, mask, k.shape[1])
    q, k, v = (repeat_heads(x, num_heads) for x in (q, k, v))
    log_decay, key_gate = (repeat_heads(x, num_heads) for x in gates)
    writes = [
        [repeat_heads(x, num_heads) for x in (each.profile, each.write_weight)]
        for each in (routing, *neighbours)
    ]
    wide = torch.promote_types(v.dtype, torch.float32)
    key_at = torch.arange(k.shape[1], device=k.device)
    distant = key_at < mask.boundaries(k.shape[1], k.device)[positions, None]
    with torch.autocast(q.device.type, enabled=False):
        seen = _seen_profiles(mask, positions, routing, wide)
        read = sum(_read_writes(mask, profile, weight, seen, key_at) for profile, weight in writes)
        weights = torch.where(distant, read, 1).masked_fill(key_at > positions[:, None], 0)
        if options.branch != "both":
            weights = weights * (distant if options.branch == "long_range" else ~distant)
        keeps = options.decay_scope == "recurrent"  # what is distant
        if log_decay is not None and not (keeps and options.branch == "long_range"):
            left = _decay(log_decay, positions, wide)
            weights = weights * torch.where(distant & keeps, 1, left)
        if key_gate is not None:
            weights = weights * _per_key(key_gate, wide)
        phi, psi = (_map(options.feature_map, x.to(wide)) for x in (q, k))
        scores = _products(phi, psi) * weights
        if options.normalize:
            total = scores.sum(-1, keepdim=True)
            scores = (scores / total.masked_fill(total == 0, 1)).masked_fill(total == 0, 0)
        return _sums(scores, v.to(wide))


def _map(name: str, x: Tensor) -> Tensor:
    """Apply a pointwise map in a form that autograd differentiates as the op does, at 0 too."""
    if name == "elu":
        positive = x.relu()  # x - positive is min(x, 0), whose slope at 0 is 1
        return (x - positive).exp() + positive
    return torch.relu(x) if name == "relu" else x


def _products(phi: Tensor, psi: Tensor) -> Tensor:
    """Multiply queries (B, R, H, r) by keys (B, T, H, r), (B, H, R, T).

    Head by head, and the keys first, so that no key is laid out anew, forward or backward.
    """
    heads = zip(phi.unbind(2), psi.unbind(2), strict=True)
    return torch.stack([(key @ query.mT).mT for query, key in heads], 1)


def _sums(scores: Tensor, values: Tensor) -> Tensor:
    """Sum values (B, T, H, V) under scores (B, H, R, T), (B, R, H, V)."""
    heads = zip(scores.unbind(1), values.unbind(2), strict=True)
    return torch.stack([score @ value for score, value in heads], 2)


def _per_key(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).transpose(1, 2).unsqueeze(2)


def _seen_profiles(
    mask: SMatMask, positions: Tensor, routing: Routing, dtype: torch.dtype
) -> Tensor:
    """Weigh every profile by the types that a query reads, (1, R, P) or (B, H, R, P)."""
    query_type, read_weight = routing.query_type, routing.read_weight
    incidence = mask.geometry.incidence(positions.device).to(dtype)
    if query_type is None:
        return incidence[mask.query_type(positions)].unsqueeze(0)
    types = query_type.long() if query_type.ndim == 4 else query_type.long().unsqueeze(-1)
    seen = incidence[types]  # (B, R, H, k, P)
    if read_weight is not None:
        seen = seen * read_weight.to(dtype).view(types.shape).unsqueeze(-1)
    return seen.sum(-2).transpose(1, 2)


def _read_writes(
    mask: SMatMask, profile: Tensor | None, weight: Tensor | None, seen: Tensor, key_at: Tensor
) -> Tensor:
    """Weigh keys, as distant ones, by what each query sees of their profiles: (..., R, T)."""
    if profile is None:
        read = seen[..., mask.profile(key_at)]
    else:
        cells = profile.long().transpose(1, 2).unsqueeze(2)  # (B, H, 1, T)
        shape = (*cells.shape[:2], seen.shape[-2], -1)
        read = seen.expand(shape).gather(-1, cells.expand(shape))
    return read if weight is None else read * _per_key(weight, seen.dtype)


def _decay(log_decay: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the gates behind each key up to each query, (B, T, H) -> (B, H, R, T).

    Keys behind a query count as not decayed; it does not see them.
    """
    count = torch.arange(1, log_decay.shape[1] + 1, device=log_decay.device)
    return LogDecay.of(log_decay.transpose(1, 2)).between(
        count[positions, None], count[None], dtype
    )
