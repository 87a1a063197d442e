"""Log-linear attention and the recurrence it refines, one token at a time: the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from smat.ops.delta_rule.reference import transition_reference, zero_state


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
    state = zero_state(k, v) if initial_state is None else initial_state
    outputs = []
    for t in range(k.shape[1]):
        if log_decay is not None:
            state = log_decay[:, t].exp()[..., None, None] * state
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


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
        if beta is not None:
            step = transition_reference(k, beta, log_decay, t)
            written = [step @ state for state in written]
        elif log_decay is not None:
            written = [log_decay[:, t].exp()[..., None, None] * state for state in written]
        key = k[:, t] if beta is None else beta[:, t, :, None] * k[:, t]
        written.append(torch.einsum("bhk,bhv->bhkv", key, v[:, t]))
        total = zero_state(k, v)
        for s, state in enumerate(written):
            level = min((t ^ s).bit_length(), level_weights.shape[-1] - 1)
            total = total + level_weights[:, t, :, level, None, None] * state
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], total))
    return torch.stack(outputs, 1)
