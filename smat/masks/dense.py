"""Write a mask out as a matrix, gated or not (block form of Section 3, gated form of Section 4).

These matrices are for looking at, counting and checking; no fast path builds one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smat.geometry import Geometry


def dense_support(
    geometry: Geometry, boundaries: Tensor, profile: Tensor, query_type: Tensor
) -> Tensor:
    """Mark the keys that each query sees.

    >>> geometry = Geometry(vc_dim=2, field_size=2)
    >>> profile, query_type = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 0]])
    >>> dense_support(geometry, torch.tensor([0, 0, 2, 2]), profile, query_type).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [0, 1, 1, 0],
            [1, 0, 1, 1]], dtype=torch.int32)

    M[t, j] = 1 for n(t) <= j <= t, C[type(t), prof(j)] for j < n(t), and 0 for j > t (0-based).

    Paper: n(t) = `boundaries`, prof = `profile`, type = `query_type`, C = `geometry.incidence()`.
    `boundaries` is `(T,)`; `profile` and `query_type` are `(..., T)`; the result is `(..., T, T)`.
    """
    position = torch.arange(len(boundaries), device=boundaries.device)
    causal = position[None, :] <= position[:, None]
    distant = position[None, :] < boundaries[:, None]
    incidence = geometry.incidence(boundaries.device)
    on_hyperplane = incidence[query_type[..., :, None], profile[..., None, :]]
    return causal & (on_hyperplane | ~distant)


def decay_between(log_decay: Tensor) -> Tensor:
    """Multiply the gates between each key and each later query: `(..., T)` -> `(..., T, T)`.

    >>> decay_between(torch.tensor([0.0, -float("inf"), -1.0]).double()).round(decimals=4)
    tensor([[1.0000, 0.0000, 0.0000],
            [0.0000, 1.0000, 0.0000],
            [0.0000, 0.3679, 1.0000]], dtype=torch.float64)

    exp(lambda_t - lambda_j) for j <= t with lambda the running sum of `log_decay`, 0 elsewhere.
    A gate of -inf forgets every earlier key; it is counted apart, since inf - inf is no number.
    """
    is_reset = torch.isneginf(log_decay)
    num_resets = is_reset.long().cumsum(-1)
    log_decay_cum = log_decay.masked_fill(is_reset, 0.0).cumsum(-1)
    # Above the diagonal the difference is positive: its exponential could overflow, and an infinity
    # that is masked away still spoils the gradient.
    difference = (log_decay_cum[..., :, None] - log_decay_cum[..., None, :]).clamp(max=0.0)
    was_reset = num_resets[..., :, None] != num_resets[..., None, :]
    return difference.exp().masked_fill(was_reset, 0.0).tril()


def heads_first(values: Tensor, device: torch.device | str) -> Tensor:
    """Move `(B, T, H)` to `(B, H, T)`; widen indices to int64 and gates to at least fp32."""
    if not values.dtype.is_floating_point:
        values = values.long()
    elif values.dtype.itemsize < 4:
        values = values.float()
    return values.to(device).movedim(-1, 1) if values.ndim == 3 else values.to(device)
