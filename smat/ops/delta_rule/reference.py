"""The delta rule and its transports one token at a time: the oracle of the chunked form.

Plain loops, any dtype, nothing but torch; slow on purpose, so that each line can be read against
its formula. Layouts are those of the fast paths: q, k (B, T, H, K), v (B, T, H, V), gates
(B, T, H), states (B, H, K, V).
"""

from __future__ import annotations

import torch
from torch import Tensor


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Step S = A S + beta k v' with A = e^g (I - beta k k'), o = scale S' q.

    >>> k, v = torch.ones(1, 2, 1, 1), torch.tensor([3.0, 5.0]).view(1, 2, 1, 1)
    >>> delta_rule_reference(k, k, v, torch.ones(1, 2, 1))[0].flatten()  # the second overwrites
    tensor([3., 5.])
    """
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    state = zero_state(k, v) if initial_state is None else initial_state
    outputs = []
    for t in range(k.shape[1]):
        state = transition_reference(k, beta, log_decay, t) @ state
        write = beta[:, t, :, None] * k[:, t]
        state = state + torch.einsum("bhk,bhv->bhkv", write, v[:, t])
        outputs.append(scale * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outputs, 1), state


def transition_reference(k: Tensor, beta: Tensor, log_decay: Tensor | None, t: int) -> Tensor:
    """Write A_t = e^g (I - beta k k') out, (B, H, K, K)."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    outer = torch.einsum("bhk,bhl->bhkl", k[:, t], k[:, t])
    step = eye - beta[:, t, :, None, None] * outer
    return step if log_decay is None else log_decay[:, t].exp()[..., None, None] * step


def transport_keys_reference(k: Tensor, beta: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """Carry every beta_j k_j through A_{j+1}, ..., A_n, one transition after the other.

    >>> k = torch.ones(1, 2, 1, 1)
    >>> transport_keys_reference(k, torch.full((1, 2, 1), 0.5)).flatten()
    tensor([0.2500, 0.5000])
    """
    carried: list[Tensor] = []
    for t in range(k.shape[1]):
        step = transition_reference(k, beta, log_decay, t)
        carried = [torch.einsum("bhkl,bhl->bhk", step, key) for key in carried]
        carried.append(beta[:, t, :, None] * k[:, t])
    return torch.stack(carried, 1)


def transport_queries_reference(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Carry every q_t back to the boundary, scale (A_t ... A_1)' q_t, and return A_T ... A_1.

    >>> k = torch.ones(1, 2, 1, 1)
    >>> transport_queries_reference(k, k, torch.full((1, 2, 1), 0.5))[0].flatten()
    tensor([0.5000, 0.2500])
    """
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    start = zero_state(k, k) + eye  # a state that is only multiplied
    return delta_rule_reference(
        q, k, torch.zeros_like(k), beta, log_decay, scale=scale, initial_state=start
    )


def zero_state(k: Tensor, v: Tensor) -> Tensor:
    """Begin with nothing: (B, H, K, V)."""
    return k.new_zeros(k.shape[0], k.shape[2], k.shape[3], v.shape[3])
