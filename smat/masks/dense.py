"""Write a mask out as a matrix, gated or not, and count its entries (Section 3, and 4 for gates).

These matrices are for looking at, counting and checking; no fast path builds one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smat.geometry import Geometry
from smat.geometry.field import to_digits


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


def count_on_hyperplane(geometry: Geometry, query_type: Tensor, num_keys: Tensor) -> Tensor:
    """Count the keys `j < num_keys` whose positional profile `j mod P` lies on each hyperplane.

    >>> geometry = Geometry(vc_dim=3, field_size=3)
    >>> count_on_hyperplane(geometry, torch.tensor([0, 1, 2]), torch.tensor([9, 10, 5]))
    tensor([3, 3, 0])

    Every turn of P keys puts q^(D-1) of them on a hyperplane. The points below the remainder are
    counted digit by digit, in O(D) for a query: such a point follows the digits of the remainder up
    to some axis and is smaller there. If the direction is nonzero on a later axis, 1 in q of these
    points is on the hyperplane; else later digits are free and this axis alone must fit the offset.
    """
    field_size, ambient_dim = geometry.field_size, geometry.ambient_dim
    if ambient_dim == 0:
        return num_keys + torch.zeros_like(query_type)
    direction_index, missing = geometry.split_type(query_type)
    direction = geometry.directions(query_type.device)[direction_index]
    digits = to_digits(num_keys % geometry.num_profiles, field_size, ambient_dim)
    inverses = [0] + [pow(value, -1, field_size) for value in range(1, field_size)]
    inverse = torch.tensor(inverses, device=query_type.device)
    total = num_keys // geometry.num_profiles * (geometry.num_profiles // field_size)
    for axis in range(ambient_dim):  # `missing` is what the remaining axes must add up to
        coefficient, digit = direction[..., axis], digits[..., axis]
        num_free = field_size ** (ambient_dim - axis - 1)
        later = (direction[..., axis + 1 :] != 0).any(-1)
        root = missing * inverse[coefficient] % field_size
        fits = torch.where(coefficient == 0, digit * (missing == 0), (root < digit).long())
        total = total + torch.where(later, digit * num_free // field_size, fits * num_free)
        missing = (missing - coefficient * digit) % field_size
    return total
