"""Log-linear attention and the recurrence it refines, one token at a time: the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from smat.ops.delta_rule.reference import (
    delta_rule_reference,
    transition_reference,
    write_reference,
    zero_state,
)


def decay_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step S = e^g S + k v', o = scale S' q.

    >>> ones = torch.ones(1, 3, 1, 1)
    >>> decay_reference(ones, ones, ones)[0].flatten()
    tensor([1., 2., 3.])
    """
    return delta_rule_reference(q, k, v, None, log_decay, scale=scale, initial_state=initial_state)


def log_linear_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    level_weights: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float = 1.0,
) -> Tensor:
    """Keep one state a written token and weigh its read by the level of the pair.

    Levels are bit_length(t XOR s), the last of `level_weights` (B, T, H, L) serving all above it.
    Without `beta` a transition is e^g, with it e^g (I - beta k k') and a write beta k v'.

    >>> ones, weights = torch.ones(1, 3, 1, 1), torch.tensor([1.0, 10.0, 100.0]).expand(1, 3, 1, 3)
    >>> log_linear_reference(ones, ones, ones, weights).flatten()  # t=2: own 1, level 2 twice
    tensor([  1.,  11., 201.])
    """
    written: list[Tensor] = []
    outputs = []
    for t in range(k.shape[1]):
        step = transition_reference(k, beta, log_decay, t)
        written = [step @ state for state in written] + [write_reference(k, v, beta, t)]
        total = zero_state(k, v)
        for s, state in enumerate(written):
            level = min((t ^ s).bit_length(), level_weights.shape[-1] - 1)
            total = total + level_weights[:, t, :, level, None, None] * state
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], total))
    return torch.stack(outputs, 1)
