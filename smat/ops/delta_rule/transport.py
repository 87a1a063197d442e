"""Keys and queries carried to the boundary by delta-rule transitions (extension appendix, GDN).

Both are reads of a state that starts as the identity and is only multiplied, so the chunked delta
rule computes them: O(T) work, one small product of matrices a chunk and none a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from smat.ops.delta_rule.chunks import check_shapes
from smat.ops.delta_rule.delta_rule import run_delta_rule


def transport_keys(
    k: Tensor, beta: Tensor, log_decay: Tensor | None = None, *, chunk_size: int = 64
) -> Tensor:
    """Carry what every token writes to the end of the sequence, (B, T, H, K) -> (B, T, H, K).

    >>> k = torch.eye(2)[[0, 1, 0]].view(1, 3, 1, 2)  # the third key erases half of the first
    >>> transport_keys(k, torch.full((1, 3, 1), 0.5)).view(3, 2)
    tensor([[0.2500, 0.0000],
            [0.0000, 0.5000],
            [0.5000, 0.0000]])

    transported_key_j = A_n ... A_{j+1} beta_j k_j,   A_t = exp(log_decay_t) (I - beta_t k_t k_t'),

    so that sum_j transported_key_j v_j' over the tokens of a profile is the profile's memory at the
    boundary. k (B, n, H, K) are the distant tokens only, beta and log_decay (B, n, H). The
    transitions are symmetric: seen backwards this is a query's transport, read one token late.
    Paper: k-bar_j = `transported_key`, n = the length of `k`.
    """
    check_shapes(k, k, chunk_size, beta=beta, log_decay=log_decay)
    writes = (k * beta.unsqueeze(-1).to(k.dtype)).flip(1)
    if k.shape[1] == 1:
        return writes
    gates = None if log_decay is None else log_decay[:, 1:].flip(1)
    carried, _ = run_delta_rule(
        writes[:, 1:], k[:, 1:].flip(1), None, beta[:, 1:].flip(1), gates, _identity(k),
        1.0, chunk_size,
    )  # fmt: skip
    return torch.cat([writes[:, :1], carried], 1).flip(1)


def transport_queries(
    q: Tensor,
    k: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_transition: Tensor | None = None,
    output_final_transition: bool = False,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """Carry every query back to the boundary, (B, T, H, K) -> (B, T, H, K).

    >>> k = torch.eye(2)[[0, 1]].view(1, 2, 1, 2)
    >>> q = torch.ones(1, 2, 1, 2)
    >>> transport_queries(q, k, torch.full((1, 2, 1), 0.5), scale=1.0)[0].view(2, 2)
    tensor([[0.5000, 1.0000],
            [0.5000, 0.5000]])

    transported_query_t = scale (A_t ... A_{n+1})' q_t,   scale = K^-1/2 unless given,

    so that transported_query_t' F reads a memory F that stood still at the boundary as if the
    transitions since had been applied to it. q, k (B, m, H, K) are the recent tokens only. The
    product A_t ... A_{n+1} (B, H, K, K), the final transition, is the whole decoding state.
    Paper: q-bar_t = `transported_query`, r = K.
    """
    check_shapes(q, k, chunk_size, beta=beta, log_decay=log_decay)
    start = _identity(k) if initial_transition is None else initial_transition
    expected = (k.shape[0], k.shape[2], k.shape[3], k.shape[3])
    if start.shape != expected:
        raise ValueError(f"initial_transition must be {expected}, not {(*start.shape,)}")
    queries, product = run_delta_rule(q, k, None, beta, log_decay, start, scale, chunk_size)
    return queries, product if output_final_transition else None


def _identity(k: Tensor) -> Tensor:
    batch, _, heads, key_dim = k.shape
    eye = torch.eye(key_dim, dtype=k.dtype, device=k.device)
    return eye.expand(batch, heads, key_dim, key_dim)
