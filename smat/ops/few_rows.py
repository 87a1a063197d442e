"""Attend from a few queries: the rows of the mask, written out.

Pooling moves T states into tables before anyone reads; R rows against all keys are R T products of
width K and V, which is less as long as R is below about K V / (K + V), and has far fewer parts. So
this is the way for a task that asks at a few positions of short sequences; many rows, or long
sequences, are read from tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smat.masks import SMatMask
from smat.ops.arguments import repeat_heads
from smat.ops.decay import LogDecay
from smat.ops.feature_maps import pointwise_map

MAX_ROWS = 64
MAX_SCORES = 1 << 24  # (B, H, R, T) weights are held for the backward pass


def is_few(q: Tensor, k: Tensor) -> bool:
    """Tell whether queries (B, R, H, K) are few enough against keys (B, T, H, K)."""
    batch, num_rows, heads = q.shape[:3]
    return num_rows <= MAX_ROWS and batch * num_rows * heads * k.shape[1] <= MAX_SCORES


def attend_few_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: tuple[Tensor | None, ...],
    reads: Sequence[Tensor | None],
    rows: Tensor,
    mask: SMatMask,
    *,
    feature_map: str,
    normalize: bool,
    branch: str,
) -> Tensor:
    """Return the output of queries (B, R, H, K) at rows (R,): (B, R, H, V), in fp32 or wider.

    >>> mask = SMatMask(seq_len=8, vc_dim=2, chunk_size=2, field_size=2)
    >>> q, k, v = torch.ones(1, 1, 1, 1), torch.ones(1, 8, 1, 1), torch.eye(8).view(1, 8, 1, 8)
    >>> nothing = (None, None, None, None)
    >>> attend_few_rows(q, k, v, nothing, (None, None), torch.tensor([6]), mask,
    ...                 feature_map="identity", normalize=False, branch="both").flatten()
    tensor([0., 1., 0., 1., 1., 1., 1., 0.])
    """
    num_heads = max(q.shape[2], v.shape[2])
    q, k, v = (repeat_heads(x, num_heads) for x in (q, k, v))
    log_decay, key_gate, write_weight, profile = (repeat_heads(x, num_heads) for x in gates)
    wide = torch.promote_types(v.dtype, torch.float32)
    phi, psi = (pointwise_map(feature_map, x.to(wide)) for x in (q, k))
    scores = _products(phi, psi)
    position = torch.arange(k.shape[1], device=k.device)
    distant = position < mask.boundaries(k.shape[1], k.device)[rows, None]
    seen = _seen_profiles(mask, rows, reads, wide)
    weights = _support(mask, rows, position, distant, profile, seen)
    if branch != "both":
        weights = weights * (distant if branch == "long_range" else ~distant)
    if write_weight is not None:
        weights = torch.where(distant, weights * _per_key(write_weight, wide), weights)
    if log_decay is not None:
        weights = weights * _decay(log_decay, rows, wide)
    if key_gate is not None:
        weights = weights * _per_key(key_gate, wide)
    scores = scores * weights
    if normalize:
        normalizer = scores.sum(-1, keepdim=True)
        is_empty = normalizer == 0
        scores = (scores / normalizer.masked_fill(is_empty, 1)).masked_fill(is_empty, 0)
    return _sums(scores, v.to(wide))


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """Multiply rows (B, R, H, K) by keys (B, T, H, K), (B, H, R, T).

    Head by head, and the keys first, so that no key is laid out anew, forward or backward.
    """
    heads = zip(rows.unbind(2), keys.unbind(2), strict=True)
    return torch.stack([(key @ row.mT).mT for row, key in heads], 1)


def _sums(scores: Tensor, values: Tensor) -> Tensor:
    """Sum values (B, T, H, V) under scores (B, H, R, T), (B, R, H, V)."""
    heads = zip(scores.unbind(1), values.unbind(2), strict=True)
    return torch.stack([score @ value for score, value in heads], 2)


def _per_key(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).transpose(1, 2).unsqueeze(2)


def _seen_profiles(
    mask: SMatMask, rows: Tensor, reads: Sequence[Tensor | None], dtype: torch.dtype
) -> Tensor:
    """Weigh every profile by the types that a row reads, (1, R, P) or (B, H, R, P)."""
    query_type, read_weight = reads
    incidence = mask.geometry.incidence(rows.device).to(dtype)
    if query_type is None:
        return incidence[mask.query_type(rows)].unsqueeze(0)
    types = query_type.long() if query_type.ndim == 4 else query_type.long().unsqueeze(-1)
    seen = incidence[types]  # (B, R, H, k, P)
    if read_weight is not None:
        seen = seen * read_weight.to(dtype).view(types.shape).unsqueeze(-1)
    return seen.sum(-2).transpose(1, 2)


def _support(
    mask: SMatMask,
    rows: Tensor,
    position: Tensor,
    distant: Tensor,
    profile: Tensor | None,
    seen: Tensor,
) -> Tensor:
    """Weigh the keys that each row sees, (1, R, T) or (B, H, R, T)."""
    if profile is None:
        on_hyperplane = seen[..., mask.profile(position)]
    else:
        cells = profile.long().transpose(1, 2).unsqueeze(2)  # (B, H, 1, T)
        shape = (*cells.shape[:2], seen.shape[-2])
        on_hyperplane = seen.expand(*shape, -1).gather(-1, cells.expand(*shape, -1))
    weights = torch.where(distant, on_hyperplane, 1)
    return weights.masked_fill(position > rows[:, None], 0)


def _decay(log_decay: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the gates behind each key up to each row, (B, T, H) -> (B, H, R, T)."""
    heads_first = log_decay.transpose(1, 2)
    counts = torch.arange(1, log_decay.shape[1] + 1, device=log_decay.device)
    decay = LogDecay(heads_first.flatten(0, 1))
    # Keys behind a row count as not decayed; no row sees them.
    between = decay.between(counts[rows, None], counts[None], dtype)
    return between.unflatten(0, heads_first.shape[:2])
