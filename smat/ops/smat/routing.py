"""Who writes where and reads what, and how strongly: the two records that op and state hand on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Routing(NamedTuple):
    """Who writes to which profile and reads which types; None is the positional assignment."""

    profile: Tensor | None = None  # (B, T, heads)
    query_type: Tensor | None = None  # (B, T, heads), or (B, T, heads, k) for k reads a query
    write_weight: Tensor | None = None  # (B, T, heads), of what goes to the profile alone
    read_weight: Tensor | None = None  # as query_type


class Gates(NamedTuple):
    """How strongly tokens are written and forgotten; None is 1."""

    log_decay: Tensor | None = None  # (B, T, heads), natural logarithm, at most 0
    key_gate: Tensor | None = None  # (B, T, heads), at least 0


NO_GATES, POSITIONAL = Gates(), Routing()
