"""Check what a caller hands over, with the caller's numbers in every complaint."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smat.machine import guard_bfloat16
from smat.masks import SMatMask, SMatWarning
from smat.ops.smat.routing import Gates, Routing

if TYPE_CHECKING:
    from smat.ops.smat.state import StateTables

BRANCHES = ("both", "causal", "long_range")
DECAY_SCOPES = ("all", "recurrent")
LOOKED_AT = ("cpu",)  # devices whose values cost no waiting


def check_tensor(name: str, x: Any, kind: str = "") -> None:
    """Refuse what is no tensor, or none of a kind: "floating-point" or "integers".

    >>> check_tensor("profile", torch.zeros(2), "integers")
    Traceback (most recent call last):
    ValueError: profile must hold integers, got torch.float32
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if kind == "floating-point" and not x.dtype.is_floating_point:
        raise ValueError(f"{name} must be floating-point, got {x.dtype}")
    no_number = x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool
    if kind == "integers" and no_number:
        raise ValueError(f"{name} must hold integers, got {x.dtype}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse a word that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_mask(mask: Any) -> None:
    """Refuse what is no mask."""
    if not isinstance(mask, SMatMask):
        raise TypeError(f"mask must be an SMatMask, got {type(mask).__name__}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, num_queries: int | None = None) -> None:
    """Refuse q, k, v (B, T, heads, .) that do not fit; q may be at ``num_queries`` positions."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, "floating-point")
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, time, heads, width), got {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
        if x.device != q.device:
            raise ValueError(f"q, k, v must share a device, got {q.device}, {k.device}, {v.device}")
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        guard_bfloat16()
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    expected = (k.shape[0], k.shape[1] if num_queries is None else num_queries)
    if k.shape[:2] != v.shape[:2] or tuple(q.shape[:2]) != expected:
        where = "time" if num_queries is None else f"the {num_queries} positions"
        raise ValueError(f"q, k and v must share batch and {where}, got {shapes}")
    if q.shape[3] != k.shape[3] or q.shape[3] == 0 or v.shape[3] == 0:
        raise ValueError(f"q and k must share a width, and none may be 0, got {shapes}")
    heads = {"query": q.shape[2], "value": v.shape[2]}
    for name, count in heads.items():
        if k.shape[2] == 0 or count == 0 or count % k.shape[2]:
            raise ValueError(
                f"the number of {name} heads must be a multiple of the key heads, got {count} and "
                f"{k.shape[2]}: {shapes}"
            )
    if k.shape[2] not in heads.values():
        raise ValueError(
            "either several query heads or several value heads share a key head, got "
            f"{q.shape[2]} query heads and {v.shape[2]} value heads beside {k.shape[2]} key heads"
        )


def check_length(k: Tensor, mask: SMatMask) -> None:
    """Refuse keys past the mask's horizon; doubt those with heads where time should be."""
    mask.check_length(k.shape[1])
    doubtful = k.shape[2] == mask.seq_len > k.shape[1] and not mask.boundary.horizon_free
    if doubtful and not torch.compiler.is_compiling():
        warnings.warn(
            f"k {tuple(k.shape)} is taken for {k.shape[1]} tokens of {k.shape[2]} heads: tensors "
            f"are (batch, time, heads, width). If the {mask.seq_len} of the mask are its tokens, "
            "transpose the time and the heads",
            SMatWarning,
            stacklevel=3,
        )


def check_device(name: str, x: Tensor, device: torch.device, whose: str = "q, k and v are") -> None:
    """Refuse a tensor on another device."""
    if x.device != device:
        raise ValueError(f"{name} must be on {device} as {whose}, got {x.device}")


def check_per_token(
    name: str, x: Tensor, like: Tensor, time: int, heads: set[int], kind: str = "floating-point"
) -> None:
    """Refuse what is not (B, time, heads) of a kind, on the device of another tensor."""
    check_tensor(name, x, kind)
    check_device(name, x, like.device)
    if x.ndim != 3 or tuple(x.shape[:2]) != (len(like), time) or x.shape[2] not in heads:
        numbers = " or ".join(str(count) for count in sorted(heads))
        raise ValueError(
            f"{name} must be (batch, time, heads) = ({len(like)}, {time}, {numbers}), "
            f"got {tuple(x.shape)}"
        )


def check_gates_and_routing(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, routing: Routing
) -> None:
    """Refuse gates, profiles, types and weights whose shapes or dtypes do not fit q, k, v."""
    heads, time = {q.shape[2], k.shape[2], v.shape[2]}, k.shape[1]
    named = {**gates._asdict(), "write_weight": routing.write_weight}
    for name, x in named.items():
        if x is not None:
            check_per_token(name, x, k, time, heads)
    if routing.profile is not None:
        check_per_token("profile", routing.profile, k, time, heads, "integers")
    types, weight = routing.query_type, routing.read_weight
    if types is None:
        if weight is not None:
            raise ValueError("read_weight weighs the types of query_type, which is missing")
        return
    check_tensor("query_type", types, "integers")
    if types.ndim == 4 and types.shape[3] < 1:
        raise ValueError(f"a query reads at least one type, got {tuple(types.shape)}")
    first = types[..., 0] if types.ndim == 4 else types
    check_per_token("query_type", first, q, q.shape[1], {max(q.shape[2], v.shape[2])}, "integers")
    if weight is not None:
        check_tensor("read_weight", weight, "floating-point")
        if weight.shape != types.shape or weight.device != q.device:
            raise ValueError(
                f"read_weight must be {tuple(types.shape)} on {q.device} as query_type is, "
                f"got {tuple(weight.shape)} on {weight.device}"
            )


def check_positions(positions: Tensor, like: Tensor) -> None:
    """Refuse positions (R,) that are no integers in [0, T), or not beside another (B, T, ...)."""
    check_tensor("positions", positions, "integers")
    check_device("positions", positions, like.device, "the tokens are")
    if positions.ndim != 1:
        raise ValueError(f"positions must be a vector, got shape {tuple(positions.shape)}")
    if not torch.compiler.is_compiling():  # the operator looks at values too
        check_range("positions", positions, like.shape[1])


def check_padding(attention_mask: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse an attention_mask that is not (B, T) of zeros and ones."""
    check_tensor("attention_mask", attention_mask)
    if attention_mask.dtype.is_complex:
        raise ValueError(f"attention_mask must hold zeros and ones, got {attention_mask.dtype}")
    if tuple(attention_mask.shape) != tuple(shape) or attention_mask.device != device:
        raise ValueError(
            f"attention_mask must be (batch, time) = {tuple(shape)} on {device}, got "
            f"{tuple(attention_mask.shape)} on {attention_mask.device}"
        )
    if attention_mask.dtype == torch.bool or torch.compiler.is_compiling():
        return
    strange, rule = (attention_mask != 0) & (attention_mask != 1), "0 for padding and 1 for tokens"
    if _holds(strange, f"attention_mask must hold {rule}"):
        first = attention_mask[strange][0].item()
        raise ValueError(f"attention_mask must hold {rule}, got {first}")


def check_packing(cu_seqlens: Tensor, q: Tensor) -> None:
    """Refuse edges of packed sequences that are no vector of integers, or a batch of several."""
    check_tensor("cu_seqlens", cu_seqlens)
    if q.shape[0] != 1:
        raise ValueError(f"packed sequences come in a batch of 1, got {q.shape[0]}")
    kind = cu_seqlens.dtype
    whole = not kind.is_floating_point and not kind.is_complex and kind != torch.bool
    vector = whole and cu_seqlens.ndim == 1 and len(cu_seqlens) >= 2
    if not vector or cu_seqlens.device != q.device:
        raise ValueError(
            f"cu_seqlens must be a vector of at least two integers on {q.device}, got "
            f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)} on {cu_seqlens.device}"
        )


def check_values(
    gates: Gates,
    routing: Routing,
    cu_seqlens: Tensor | None,
    positions: Tensor | None,
    mask: SMatMask,
    length: int,
) -> None:
    """Refuse values that do not fit.

    Called inside the operator: a compiled graph runs it too, and padding is gone by then, so that
    it may have held anything.
    """
    check_gate_values(gates)
    if positions is not None:
        check_range("positions", positions, length)
    edges = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    if edges[0] != 0 or edges[-1] != length or sorted(edges) != edges:
        raise ValueError(f"cu_seqlens must rise from 0 to the packed length {length}, got {edges}")
    if routing.profile is None and routing.query_type is None:
        return
    for start, stop in itertools.pairwise(edges):
        own = mask if cu_seqlens is None or stop == start else mask.for_length(stop - start)
        inside = routing._replace(
            profile=None if routing.profile is None else routing.profile[:, start:stop],
            query_type=None if routing.query_type is None else routing.query_type[:, start:stop],
        )
        check_routing_values(inside, own)


def check_gate_values(gates: Gates) -> None:
    """Refuse gates that would grow what they should forget, or write less than nothing."""
    log_decay, key_gate = gates
    if log_decay is not None and _holds(log_decay > 0, "log_decay must be at most 0"):
        raise ValueError(f"log_decay must be at most 0, got {_extreme(log_decay, torch.amax)}")
    if key_gate is not None and _holds(key_gate < 0, "key_gate must not be negative"):
        raise ValueError(f"key_gate must not be negative, got {_extreme(key_gate, torch.amin)}")


def check_routing_values(routing: Routing, mask: SMatMask) -> None:
    """Refuse profiles and types that the mask's geometry does not have."""
    if routing.profile is not None:
        check_range("profile", routing.profile, mask.geometry.num_profiles, mask)
    if routing.query_type is not None:
        check_range("query_type", routing.query_type, mask.geometry.num_types, mask)


def check_range(name: str, index: Tensor, limit: int, mask: SMatMask | None = None) -> None:
    """Refuse indices outside [0, limit)."""
    if index.is_meta:
        raise ValueError(f"{name} must hold values, got a tensor on meta")
    index = index.long()
    if _holds((index < 0) | (index >= limit), f"{name} must lie in [0, {limit})"):
        low, high = (_extreme(index, end) for end in (torch.amin, torch.amax))
        whose = "" if mask is None else f" for {mask.describe()}"
        raise ValueError(f"{name} must lie in [0, {limit}){whose}, got values from {low} to {high}")


def _holds(wrong: Tensor, rule: str) -> bool:
    """Whether anything is wrong; elsewhere than on a CPU the device stops by itself.

    Asking it would make the host wait for all that was launched before.
    """
    if wrong.device.type in LOOKED_AT:
        return bool(wrong.any())
    torch._assert_async(~wrong.any(), rule)
    return False


def _extreme(x: Tensor, end: Callable[[Tensor], Tensor]) -> float | int:
    return end(x).item() if x.numel() else 0


def check_new_tokens(
    state: StateTables, q: Tensor, k: Tensor, v: Tensor, gates: Gates, routing: Routing
) -> None:
    """Refuse tokens that do not fit a state, or that it has no room for."""
    spec = state.spec
    check_qkv(q, k, v)
    if len(k) != len(state) or k.device != state.device:
        raise ValueError(
            f"the state has a batch of {len(state)} on {state.device}, got {len(k)} on {k.device}"
        )
    if max(q.shape[2], v.shape[2]) != spec.query_heads or spec.heads % v.shape[2]:
        raise ValueError(
            f"the state has {spec.query_heads} heads of queries and {spec.heads} of values, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if v.shape[3] != spec.value_dim:
        raise ValueError(f"v must have width {spec.value_dim}, got {tuple(v.shape)}")
    check_gates_and_routing(q, k, v, gates, routing)
    named = {**gates._asdict(), "profile": routing.profile, "write_weight": routing.write_weight}
    for name, x in named.items():
        if x is not None and spec.heads % x.shape[2]:
            raise ValueError(
                f"{name} must have one value for each of the state's {spec.heads} key heads, got "
                f"{x.shape[2]} heads"
            )
    check_gate_values(gates)
    check_routing_values(routing, state.mask)
    several = routing.query_type is not None and routing.query_type.ndim == 4
    weighs = several or routing.read_weight is not None or routing.write_weight is not None
    if weighs and state.mask.vc_dim == 1 and not state.tells_distant:
        raise ValueError(
            "at d = 1 a state takes write_weight, read_weight and several reads only if made with "
            "weighted=True"
        )
