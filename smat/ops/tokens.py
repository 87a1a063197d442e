"""New tokens for a decoding state: checked against it, and as the arrays that it works on."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from smat.masks.checks import check_index
from smat.ops.decay import FORGETS
from smat.ops.feature_maps import pointwise
from smat.ops.state import StateTables


@dataclass(frozen=True)
class Tokens:
    """Tokens (B, T, heads, ...): features, augmented values, gates and routing.

    phi is absent where nothing is to be read, and far where what goes to the profile table is psi.
    """

    phi: Tensor | None
    psi: Tensor
    far: Tensor | None
    v: Tensor
    log_decay: Tensor | None = None  # fp64, clamped
    profile: Tensor | None = None
    query_type: Tensor | None = None  # (B, T, Hq), or (B, T, Hq, k)
    read_weight: Tensor | None = None

    def rows(self, index: Tensor | None, length: int) -> Tokens:
        """Take some batch rows, and their first tokens."""

        def cut(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            return (x if index is None else x[index])[:, :length]

        return Tokens(*(cut(getattr(self, each.name)) for each in fields(self)))  # type: ignore[arg-type]

    def between(self, start: int, stop: int) -> Tokens:
        """Take a range of time."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, start:stop]

        return Tokens(*(cut(getattr(self, each.name)) for each in fields(self)))  # type: ignore[arg-type]


def load_tokens(
    state: StateTables,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    key_gate: Tensor | None = None,
    write_weight: Tensor | None = None,
    profile: Tensor | None = None,
    query_type: Tensor | None = None,
    read_weight: Tensor | None = None,
    mapped: bool = False,
) -> Tokens:
    """Check new tokens (B, T, heads, .) and turn them into features and augmented values.

    ``mapped`` says that k already went through a feature map that is not pointwise.
    """
    _check_values(state, q, k, v)
    sizes, dtype = state.sizes, state.dtype
    before = None if mapped else state.map_before
    phi = None
    if q is not None:
        phi = _features(state, q if before is None else before(q))
        phi = _heads(phi, sizes.query_heads, "q")
    psi = _heads(_features(state, k if before is None else before(k)), sizes.heads, "k")
    v = _heads(v.to(dtype), sizes.heads, "v")
    if sizes.normalize:
        v = torch.nn.functional.pad(v, (0, 1), value=1.0)
    gates = {"log_decay": log_decay, "key_gate": key_gate, "write_weight": write_weight}
    given = {
        name: None if x is None else _heads(_per_token(x, k, name), sizes.heads, name)
        for name, x in (gates | {"profile": profile}).items()
    }
    psi, far = _weigh(state, psi, given["key_gate"], given["write_weight"])
    check_index("profile", given["profile"], state.mask.geometry.num_profiles)
    query_type, read_weight = _reads(state, k, query_type, read_weight)
    log_decay = _clamped(given["log_decay"])
    return Tokens(phi, psi, far, v, log_decay, given["profile"], query_type, read_weight)


def _weigh(
    state: StateTables, psi: Tensor, key_gate: Tensor | None, write_weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scale what tokens write, and apart from that what they write to their profiles."""
    if key_gate is not None:
        psi = psi * key_gate.to(psi.dtype).unsqueeze(-1)
    if write_weight is None:
        return psi, None
    if state.mask.vc_dim == 1 and not state.sizes.weighted:
        raise ValueError("at d = 1 a state takes a write_weight only if made with weighted=True")
    return psi, psi * write_weight.to(psi.dtype).unsqueeze(-1)


def _clamped(log_decay: Tensor | None) -> Tensor | None:
    """Check log-gates and bring them into the range in which their sums stay finite."""
    if log_decay is None:
        return None
    if bool((log_decay > 0).any()):  # NaN goes through
        raise ValueError(f"log_decay must be at most 0, got {log_decay.max().item()}")
    return log_decay.double().clamp(min=FORGETS)


def _check_values(state: StateTables, q: Tensor | None, k: Tensor, v: Tensor) -> None:
    sizes = state.sizes
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is None:
            continue
        if x.ndim != 4 or x.shape[:2] != k.shape[:2] or len(x) != len(state):
            raise ValueError(
                f"{name} must be (batch, time, heads, width) with batch {len(state)} and one time, "
                f"got {tuple(x.shape)} beside k {tuple(k.shape)}"
            )
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} must be floating-point, got {x.dtype}")
        if x.device != state.device:
            raise ValueError(f"{name} is on {x.device}, but the state on {state.device}")
    shares = k.shape[2] < v.shape[2]  # heads of values that share a query and a key
    query_heads = k.shape[2] if shares else sizes.query_heads
    if q is not None and q.shape[2] != query_heads:
        raise ValueError(f"q must have {query_heads} heads, got {q.shape[2]}")
    if v.shape[2:] not in ((sizes.heads, sizes.value_dim), (k.shape[2], sizes.value_dim)):
        raise ValueError(
            f"v must have {k.shape[2]} heads of width {sizes.value_dim}, got {tuple(v.shape)}"
        )


def _features(state: StateTables, x: Tensor) -> Tensor:
    if x.shape[-1] != state.sizes.feature_dim:
        raise ValueError(f"the state holds {state.sizes.feature_dim} features, got {x.shape[-1]}")
    return pointwise(state.pointwise, x.to(state.dtype))


def _per_token(x: Tensor, k: Tensor, name: str) -> Tensor:
    if x.ndim != 3 or x.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"{name} must be (batch, time, heads) = ({k.shape[0]}, {k.shape[1]}, .), "
            f"got {tuple(x.shape)}"
        )
    return x


def _heads(x: Tensor, num_heads: int, name: str) -> Tensor:
    """Repeat key heads if the state holds one for every query head."""
    if x.shape[2] == num_heads:
        return x
    if x.shape[2] == 0 or num_heads % x.shape[2]:
        raise ValueError(
            f"{name} must have one value for each of the state's {num_heads} key heads, "
            f"got {x.shape[2]} heads"
        )
    return x.repeat_interleave(num_heads // x.shape[2], 2)


def _reads(
    state: StateTables, k: Tensor, query_type: Tensor | None, read_weight: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Check which types are read, and with which weights."""
    if query_type is None:
        if read_weight is not None:
            raise ValueError("read_weight weighs the types of query_type, which is missing")
        return None, None
    wanted = (*k.shape[:2], state.sizes.query_heads)
    if query_type.shape[:3] != wanted or query_type.ndim not in (3, 4):
        raise ValueError(
            f"query_type must be {wanted}, or {(*wanted, 'k')} for k reads, "
            f"got {tuple(query_type.shape)}"
        )
    check_index("query_type", query_type, state.mask.geometry.num_types)
    if read_weight is not None and read_weight.shape != query_type.shape:
        raise ValueError(
            f"read_weight must be {tuple(query_type.shape)} as query_type is, "
            f"got {tuple(read_weight.shape)}"
        )
    weighs = query_type.ndim == 4 or read_weight is not None
    if weighs and state.mask.vc_dim == 1 and not state.sizes.weighted:
        raise ValueError("at d = 1 a state takes several reads only if made with weighted=True")
    if read_weight is not None:
        read_weight = read_weight.to(state.dtype)
    return query_type.long(), read_weight
