"""Normalised kernel attention under any mask, written out densely: the oracle of every fast path.

It imports nothing but torch and shares no code with what it judges. It costs T^2 memory and is
meant for fp64 and short sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

FeatureMap = str | Callable[[Tensor], Tensor]

_FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu": lambda x: torch.nn.functional.elu(x) + 1,
    "relu": torch.relu,
    "identity": lambda x: x,
}


_PER_TOKEN = (
    "log_decay", "key_gate", "write_weight", "profile", "query_type", "read_weight",
)  # fmt: skip


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    *,
    feature_map: FeatureMap = "elu",
    normalize: bool = True,
    positions: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    branch: str = "both",
    decay_scope: str = "all",
    **per_token: Tensor | None,
) -> Tensor:
    """Attend densely: the arguments of ``smat_attention``, the output alone.

    >>> class Causal:
    ...     def dense(self, length, **_):
    ...         return torch.ones(length, length, dtype=torch.bool).tril()
    ...     def boundaries(self, length, device=None):
    ...         return torch.zeros(length, dtype=torch.long)
    >>> x = torch.ones(1, 3, 1, 2)
    >>> reference_attention(x, x, x.cumsum(1), Causal())[0, :, 0, 0]
    tensor([1.0000, 1.5000, 2.0000])

    o_i = sum_j M_ij (phi_i . psi_j) v_j / sum_j M_ij (phi_i . psi_j), equation 3.
    """
    strange = set(per_token) - set(_PER_TOKEN)
    if strange:
        raise TypeError(f"reference_attention takes no argument {', '.join(sorted(strange))}")
    per_token = {name: per_token.get(name) for name in _PER_TOKEN}
    if v.shape[2] > k.shape[2]:  # heads of values that share a query and a key
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    phi, psi = _features(feature_map, q), _features(feature_map, k)
    out = v.new_zeros(*q.shape[:3], v.shape[-1])
    for row, index, row_mask in _sequences(q, mask, attention_mask, cu_seqlens):
        taken = {
            name: None if value is None else value[row, index] for name, value in per_token.items()
        }
        arrays = phi[row, index], psi[row, index], v[row, index]
        dense = _attend(*arrays, row_mask, normalize, branch, decay_scope, taken)
        out = out.index_put((torch.full_like(index, row), index), dense)
    return out if positions is None else out[:, positions]


def _features(feature_map: FeatureMap, x: Tensor) -> Tensor:
    if callable(feature_map):
        return feature_map(x)
    if feature_map not in _FEATURE_MAPS:
        raise ValueError(
            f"the oracle knows {', '.join(_FEATURE_MAPS)}; pass any other map itself, "
            f"got {feature_map!r}"
        )
    return _FEATURE_MAPS[feature_map](x)


def _sequences(
    q: Tensor, mask: Any, attention_mask: Tensor | None, cu_seqlens: Tensor | None
) -> list[tuple[int, Tensor, Any]]:
    """List each sequence as (batch row, its token positions, its mask)."""
    if cu_seqlens is not None:
        edges = cu_seqlens.tolist()
        spans = [edges[place : place + 2] for place in range(len(edges) - 1)]
        return [
            (0, torch.arange(start, stop, device=q.device), mask.for_length(stop - start))
            for start, stop in spans
            if stop > start
        ]
    if attention_mask is None:
        attention_mask = torch.ones(q.shape[:2], device=q.device)
    return [(row, real.nonzero().squeeze(-1), mask) for row, real in enumerate(attention_mask)]


def _attend(
    phi: Tensor,
    psi: Tensor,
    v: Tensor,
    mask: Any,
    normalize: bool,
    branch: str,
    decay_scope: str,
    per_token: dict[str, Any],
) -> Tensor:
    """Attend within one sequence, (T, H, .) -> (T, H, V)."""
    length, num_heads = phi.shape[:2]
    if length == 0:
        return v.new_zeros(0, num_heads, v.shape[-1])
    group = num_heads // psi.shape[1]
    psi, v = psi.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    given = {
        name: None if value is None else value.repeat_interleave(num_heads // value.shape[1], 1)
        for name, value in per_token.items()
    }
    position = torch.arange(length, device=phi.device)
    distant = position < mask.boundaries(length, phi.device)[:, None]
    weights = _support(given, mask, distant, num_heads, phi)
    if branch != "both":
        weights = weights * (distant if branch == "long_range" else ~distant)
    if given["write_weight"] is not None:
        weights = torch.where(distant, weights * given["write_weight"].T[:, None, :], weights)
    if given["log_decay"] is not None:
        keeps = distant & (decay_scope == "recurrent")
        weights = weights * torch.where(keeps, 1, _decay(given["log_decay"]))
    if given["key_gate"] is not None:
        psi = psi * given["key_gate"].unsqueeze(-1)
    scores = torch.einsum("ihr,jhr->hij", phi, psi) * weights
    out = torch.einsum("hij,jhp->ihp", scores, v)
    if not normalize:
        return out
    normalizer = scores.sum(-1).T.unsqueeze(-1)
    return torch.where(normalizer == 0, 0, out / torch.where(normalizer == 0, 1, normalizer))


def _support(
    given: dict[str, Any], mask: Any, distant: Tensor, num_heads: int, phi: Tensor
) -> Tensor:
    """Lay out who sees whom, (H, T, T): of distant keys, the weighted sum of a query's reads."""
    length = len(phi)
    profile, query_type = given["profile"], given["query_type"]
    profile = None if profile is None else profile.unsqueeze(0)
    several = query_type is not None and query_type.ndim == 3
    reads = query_type.unbind(-1) if several else [query_type]
    recent, total = phi.new_zeros(()), phi.new_zeros(num_heads, length, length)
    for place, each in enumerate(reads):
        types = None if each is None else each.unsqueeze(0)
        seen = mask.dense(length, device=phi.device, profile=profile, query_type=types)
        recent = seen.to(phi.dtype).reshape(-1, length, length).expand(num_heads, -1, -1)
        weight = given["read_weight"]
        if weight is not None:
            weight = weight[..., place] if several else weight
        total = total + (recent if weight is None else recent * weight.T.unsqueeze(-1))
    return torch.where(distant, total, recent)


def _decay(log_decay: Tensor) -> Tensor:
    """Multiply the gates after key j up to query i, (T, H) -> (H, T, T).

    Each key's gates are summed from the key on, so that nothing large is ever subtracted.
    """
    length = len(log_decay)
    later = torch.ones(length, length, dtype=torch.bool, device=log_decay.device).tril(-1)
    gates = torch.where(later, log_decay.T[:, :, None], 0)  # (H, k, j): the gate of k, for j < k
    return torch.where(later, gates.cumsum(1).exp(), 1)
