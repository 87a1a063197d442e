"""Entries of the state's tables, numbered through: where tokens write, and what queries read.

An entry is one r x p state of ``profile_table`` or ``type_table``, counted over slots (or buffers),
batch rows, heads and profiles (or types). Numbers let rows at different positions, and tokens with
profiles or types of their own, be served by one gather or scatter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.ops.fold import decay_factor
from smat.ops.state import StateTables

READ_ELEMENTS = 1 << 22  # of the index that one share of reads needs


def profile_entries(state: StateTables, edge: Tensor, rows: Tensor, profile: Tensor) -> Tensor:
    """Number the entries (n, H, ...) that rows with given newest edges write to."""
    slots, batch, heads, num_profiles = state.tensors["profile_epoch"].shape
    head = torch.arange(heads, device=state.device)
    row = (edge % slots * batch + rows)[:, None] * heads + head
    return row.view(*row.shape, *[1] * (profile.ndim - 2)) * num_profiles + profile


def type_entries(
    state: StateTables, segment: int | Tensor, rows: Tensor, query_type: Tensor
) -> Tensor:
    """Number the entries (n, Hq, ...) that rows in given segments read."""
    buffers, batch, heads, num_types = state.tensors["type_table"].shape[:4]
    head = torch.arange(state.sizes.query_heads, device=state.device) // state.sizes.group
    row = (segment % buffers * batch + rows)[:, None] * heads + head
    return row.view(*row.shape, *[1] * (query_type.ndim - 2)) * num_types + query_type


def refresh_entries(state: StateTables, entry: Tensor, edge: int | Tensor) -> None:
    """Bring distinct entries up to date: zero if of an older epoch, else decayed up to now."""
    epoch = state.own("profile_epoch").view(-1)
    stale = epoch[entry] != edge
    epoch[entry] = edge
    table = state.own("profile_table").flatten(0, 3)
    if "log_decay" not in state.tensors:
        table[entry[stale]] = 0
        return
    pairs = state.tensors["log_decay"].view(-1, 2)
    now = pairs[entry // state.mask.geometry.num_profiles % len(pairs)]
    last = state.own("profile_log_decay").view(-1, 2)
    left = decay_factor(now - last[entry], state.dtype)[:, None, None]
    table[entry] = torch.where(stale[:, None, None], 0, table[entry] * left)
    last[entry] = now


def add_to_entries(state: StateTables, entry: Tensor, far: Tensor, v: Tensor) -> None:
    """Add outer products to entries, (M,), (M, r), (M, p); an entry may occur more than once."""
    table = state.own("profile_table").flatten(0, 3)
    table.index_add_(0, entry, far.unsqueeze(-1) * v.unsqueeze(-2))


def read_entries(table: Tensor, entry: Tensor, phi: Tensor, weight: Tensor | None) -> Tensor:
    """Contract each query with one entry, or with the weighted sum of several: (M, k), (M, r)."""
    feature_dim, aug_dim = table.shape[-2:]
    entry = entry.view(len(entry), -1, 1)
    feature = torch.arange(feature_dim, device=table.device)
    share = max(1, READ_ELEMENTS // (entry.shape[1] * feature_dim))
    answers = []
    for first in range(0, len(entry), share):
        part = slice(first, first + share)
        rows = (entry[part] * feature_dim + feature).flatten(1)
        weights = phi[part, None].expand(-1, entry.shape[1], -1)
        if weight is not None:
            weights = weights * weight[part].view(len(rows), -1, 1)
        answers.append(
            F.embedding_bag(
                rows, table.view(-1, aug_dim), mode="sum",
                per_sample_weights=weights.reshape(rows.shape),
            )
        )  # fmt: skip
    return torch.cat(answers)
