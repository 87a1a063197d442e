"""The delta rule one token at a time: the oracle of the chunked form, with its arguments.

Plain loops, any dtype, nothing but torch; slow on purpose, so that each line can be read against
its formula.
"""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step S = A S + beta k v' with A = e^g (I - beta k k'), o = scale S' q.

    >>> k, v = torch.ones(1, 2, 1, 1), torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    >>> delta_rule_reference(k, k, v, torch.ones(1, 2, 1))[0].flatten()  # the second overwrites
    tensor([3., 5.])

    Without `beta` nothing is erased: A = e^g, and k v' is added.
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    state = zero_state(k, v) if initial_state is None else initial_state
    outputs = []
    for t in range(k.shape[1]):
        state = transition_reference(k, beta, log_decay, t) @ state
        state = state + write_reference(k, v, beta, t)
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def transition_reference(
    k: Tensor, beta: Tensor | None, log_decay: Tensor | None, t: int
) -> Tensor:
    """Write A_t = e^g (I - beta k k') out, (B, H, K, K), or what gives it by broadcasting."""
    step = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    if beta is not None:
        step = step - write_reference(k, k, beta, t)
    return step if log_decay is None else log_decay[:, t].exp()[..., None, None] * step


def write_reference(k: Tensor, v: Tensor, beta: Tensor | None, t: int) -> Tensor:
    """Write beta_t k_t v_t' out, (B, H, K, V)."""
    key = k[:, t] if beta is None else beta[:, t, :, None] * k[:, t]
    return torch.einsum("bhk,bhv->bhkv", key, v[:, t])


def zero_state(k: Tensor, v: Tensor) -> Tensor:
    """Begin with nothing: (B, H, K, V)."""
    return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])
