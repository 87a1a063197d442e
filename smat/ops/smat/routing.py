"""The records that the op hands on: who writes where and reads what, how strongly, and the rest."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from smat.masks import SMatMask


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


def sort_per_token(function: str, given: dict[str, Tensor | None]) -> tuple[Gates, Routing]:
    """Sort keyword arguments into gates and routing.

    >>> sort_per_token("step", {"cu_seqlen": None})
    Traceback (most recent call last):
    TypeError: step takes no argument cu_seqlen
    """
    strange = sorted(set(given) - {*Gates._fields, *Routing._fields})
    if strange:
        raise TypeError(f"{function} takes no argument {', '.join(strange)}")
    gates, routing = ([given.get(name) for name in kind._fields] for kind in (Gates, Routing))
    return Gates(*gates), Routing(*routing)


class Options(NamedTuple):
    """What the op does, beside its tensors."""

    mask: SMatMask
    feature_map: str = "elu"
    normalize: bool = True
    branch: str = "both"  # or one of "causal" and "long_range"
    decay_scope: str = "all"  # or "recurrent": distant keys do not decay
    backend: str = "auto"


class Inputs(NamedTuple):
    """The tensors of the op: q (B, T, Hq, K), k (B, T, Hk, K), v (B, T, Hv, V), and per token.

    One of Hq and Hv is Hk, and the larger is H, the heads of the output. Gates, profiles and write
    weights are (B, T, Hv), the key gate (B, T, Hk), types and read weights (B, T, H) or more.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    routing: Routing
    cu_seqlens: Tensor | None = None
