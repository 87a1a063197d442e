"""Algorithm 1 on one page: the first thing to read, slow and exact.

Every query sees its recent keys through the causal branch, and of the distant ones those on its
hyperplane through the long-range branch; the two are added and divided once. Gates, all boundary
schedules, content routing and (by autograd) gradients are here; what `smat.ops` adds is speed,
padding, packing and a state to decode from. B batch, H heads, T tokens, r features, p = V + 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.masks import SMatMask


def minimal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SMatMask,
    log_decay: Tensor | None = None,
    profile: Tensor | None = None,
    query_type: Tensor | None = None,
) -> Tensor:
    """Attend under an SMat mask: q, k (B, T, H, K), v (B, T, H, V), the rest (B, T, H).

    >>> mask = SMatMask(seq_len=64, vc_dim=3, chunk_size=8, field_size=3)
    >>> q, k, v = torch.randn(3, 2, 64, 4, 8, dtype=torch.float64)
    >>> from smat.ops import smat_attention
    >>> torch.allclose(minimal_attention(q, k, v, mask), smat_attention(q, k, v, mask)[0])
    True
    """
    batch, length, heads, _ = q.shape
    position = torch.arange(length, device=q.device)[:, None].expand(batch, -1, heads)
    gates = v.new_zeros(batch, length, heads) if log_decay is None else log_decay
    profile = mask.profile(position) if profile is None else profile
    query_type = mask.query_type(position) if query_type is None else query_type
    phi, psi = (F.elu(x).add(1).transpose(1, 2) for x in (q, k))  # (B, H, T, r)
    v_aug = F.pad(v, (0, 1), value=1.0).transpose(1, 2)  # a constant 1 gathers the normaliser
    gates, profile, query_type = (x.transpose(1, 2) for x in (gates, profile, query_type))
    total = F.pad(gates, (1, 0)).cumsum(-1)  # lambda, after 0, 1, ..., T tokens
    answers = []
    for segment in mask.segments(length):  # queries with one boundary n
        n, asks = segment.boundary, slice(segment.start, segment.stop)
        window = slice(n, segment.stop)
        recent = causal(
            phi[:, :, window], psi[:, :, window], v_aug[:, :, window], gates[..., window]
        )
        y = recent[:, :, segment.start - n :]
        if n > 0:
            distant = slice(0, n)
            left = (total[..., n, None] - total[..., 1 : n + 1]).exp()  # of each key at n
            keys, values = psi[:, :, distant], v_aug[:, :, distant]
            states = torch.einsum("bhtr,bhtp,bht->bhtrp", keys, values, left)
            pooled = pool(states, profile[:, :, distant], mask.geometry.num_profiles)
            table = mask.geometry.tabulate(pooled.flatten(-2)).unflatten(-1, pooled.shape[-2:])
            since = (total[..., segment.start + 1 : segment.stop + 1] - total[..., n, None]).exp()
            seen = read(table, query_type[:, :, asks])
            y = y + torch.einsum("bhtr,bhtrp,bht->bhtp", phi[:, :, asks], seen, since)
        answers.append(y)
    y = torch.cat(answers, 2).transpose(1, 2)
    normalizer = y[..., -1:]
    return y[..., :-1] / normalizer.masked_fill(normalizer == 0, torch.inf)


def pool(states: Tensor, profile: Tensor, num_profiles: int) -> Tensor:
    """Sum the states of distant keys by profile: (B, H, n, r, p) -> (B, H, P, r, p)."""
    table = states.new_zeros(*states.shape[:2], num_profiles, *states.shape[3:])
    return table.scatter_add(2, profile[..., None, None].expand_as(states), states)


def read(table: Tensor, query_type: Tensor) -> Tensor:
    """Give every query the state of its type: (B, H, types, r, p) -> (B, H, t, r, p)."""
    index = query_type[..., None, None].expand(*query_type.shape, *table.shape[3:])
    return table.gather(2, index)


def causal(phi: Tensor, psi: Tensor, v: Tensor, gates: Tensor, chunk_size: int = 64) -> Tensor:
    """Linear attention with decay, chunk by chunk: a dense tile, and a state that is carried on."""
    state = phi.new_zeros(*phi.shape[:2], phi.shape[-1], v.shape[-1])
    answers = []
    for chunk in zip(*(x.split(chunk_size, 2) for x in (phi, psi, v, gates)), strict=True):
        queries, keys, values, steps = chunk
        total = steps.cumsum(-1)
        between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        since, until = total.exp().unsqueeze(-1), (total[..., -1:] - total).exp().unsqueeze(-1)
        answers.append((queries @ keys.mT * between) @ values + queries * since @ state)
        state = state * since[..., -1:, :] + (keys * until).mT @ values
    return torch.cat(answers, 2)
