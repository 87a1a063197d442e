"""Check the arguments of attention, with the caller's numbers in every complaint."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from smat.masks import SMatMask


def check_arguments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SMatMask,
    *,
    log_decay: Tensor | None,
    key_gate: Tensor | None,
    write_weight: Tensor | None,
    profile: Tensor | None,
    query_type: Tensor | None,
    read_weight: Tensor | None,
    positions: Tensor | None,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    output_final_state: bool,
    at_positions: bool = False,
) -> None:
    """Refuse shapes and dtypes that do not fit; nothing is silently broadcast or truncated.

    `at_positions` says that there is a query for each of the positions, not for each token.
    """
    check_positions(positions, k.shape[1] if k.ndim > 1 else 0)
    num_queries = len(positions) if at_positions and positions is not None else None
    _check_qkv(q, k, v, num_queries)
    if cu_seqlens is None:
        mask.check_length(k.shape[1])
    for name, gate in (
        ("log_decay", log_decay), ("key_gate", key_gate), ("write_weight", write_weight),
    ):  # fmt: skip
        if gate is not None:
            _check_per_token(name, gate, k.shape[1], q, k, v)
            if not gate.dtype.is_floating_point:
                raise ValueError(f"{name} must be floating-point, got {gate.dtype}")
    if profile is not None:
        _check_per_token("profile", profile, k.shape[1], q, k, v)
        _check_integers("profile", profile)
    _check_reads(query_type, read_weight, q, v)
    _check_padding(attention_mask, cu_seqlens, q)
    _check_packing(cu_seqlens, q)


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, num_queries: int | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(
                f"{name} must be (batch, time, heads, width), got shape {tuple(x.shape)}"
            )
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} must be floating-point, got {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share a dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must share a device, got {q.device}, {k.device}, {v.device}")
    if num_queries is not None and q.shape[:2] != (k.shape[0], num_queries):
        raise ValueError(
            f"q must be (batch, positions, ...) = ({k.shape[0]}, {num_queries}, ...), got "
            f"{tuple(q.shape)}"
        )
    same_time = num_queries is not None or q.shape[:2] == k.shape[:2]
    if k.shape[:2] != v.shape[:2] or not same_time:
        raise ValueError(
            "q, k and v must share batch and time, got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must share a width, got {q.shape[3]} and {k.shape[3]}")
    heads = {"query": q.shape[2], "value": v.shape[2]}
    for name, count in heads.items():
        if k.shape[2] == 0 or count == 0 or count % k.shape[2]:
            raise ValueError(
                f"the number of {name} heads must be a multiple of the key heads, got {count} and "
                f"{k.shape[2]}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
            )
    if k.shape[2] not in heads.values():
        raise ValueError(
            "either several query heads or several value heads share a key head, got "
            f"{q.shape[2]} query heads and {v.shape[2]} value heads beside {k.shape[2]} key heads"
        )


def _check_per_token(name: str, x: Tensor, time: int, q: Tensor, *others: Tensor) -> None:
    allowed = (q.shape[2], *(each.shape[2] for each in others))
    if x.ndim != 3 or x.shape[:2] != (q.shape[0], time) or x.shape[2] not in allowed:
        heads = " or ".join(str(count) for count in sorted(set(allowed)))
        raise ValueError(
            f"{name} must be (batch, time, heads) = ({q.shape[0]}, {time}, {heads}), "
            f"got {tuple(x.shape)}"
        )


def _check_reads(
    query_type: Tensor | None, read_weight: Tensor | None, q: Tensor, v: Tensor
) -> None:
    if query_type is None:
        if read_weight is not None:
            raise ValueError("read_weight weighs the types of query_type, which is missing")
        return
    if query_type.ndim == 4 and query_type.shape[3] < 1:
        raise ValueError(f"a query reads at least one type, got {tuple(query_type.shape)}")
    first = query_type[..., 0] if query_type.ndim == 4 else query_type
    _check_per_token("query_type", first, q.shape[1], v if v.shape[2] > q.shape[2] else q)
    _check_integers("query_type", query_type)
    if read_weight is None:
        return
    if read_weight.shape != query_type.shape:
        raise ValueError(
            f"read_weight must be {tuple(query_type.shape)} as query_type is, "
            f"got {tuple(read_weight.shape)}"
        )
    if not read_weight.dtype.is_floating_point:
        raise ValueError(f"read_weight must be floating-point, got {read_weight.dtype}")


def several_reads(query_type: Tensor | None, read_weight: Tensor | None) -> bool:
    """Whether what a query reads of distant keys is weighed, or read more than once."""
    return query_type is not None and (query_type.ndim == 4 or read_weight is not None)


def _check_integers(name: str, index: Tensor) -> None:
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, got {index.dtype}")


def check_positions(positions: Tensor | None, length: int) -> None:
    """Refuse rows (R,) that are no integers in [0, length)."""
    if positions is None:
        return
    if positions.ndim != 1 or positions.dtype.is_floating_point or positions.dtype == torch.bool:
        raise ValueError(
            f"positions must be a vector of integers, got {positions.dtype} of shape "
            f"{tuple(positions.shape)}"
        )
    if torch.compiler.is_compiling():  # the gather at these positions has its own check
        return
    _check_range("positions", positions, length)


def _check_padding(attention_mask: Tensor | None, cu_seqlens: Tensor | None, q: Tensor) -> None:
    if attention_mask is None:
        return
    if cu_seqlens is not None:
        raise ValueError("attention_mask and cu_seqlens exclude each other: pack or pad, not both")
    if attention_mask.shape != q.shape[:2]:
        raise ValueError(
            f"attention_mask must be (batch, time) = {tuple(q.shape[:2])}, got "
            f"{tuple(attention_mask.shape)}"
        )


def _check_packing(cu_seqlens: Tensor | None, q: Tensor) -> None:
    if cu_seqlens is None:
        return
    if q.shape[0] != 1:
        raise ValueError(f"packed sequences come in a batch of 1, got {q.shape[0]}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.dtype.is_floating_point:
        raise ValueError(
            f"cu_seqlens must be a vector of at least two integers, got {cu_seqlens.dtype} of "
            f"shape {tuple(cu_seqlens.shape)}"
        )


def check_values(
    log_decay: Tensor | None,
    profile: Tensor | None,
    query_type: Tensor | None,
    cu_seqlens: Tensor | None,
    positions: Tensor | None,
    mask: SMatMask,
    length: int,
) -> None:
    """Refuse values that do not fit.

    Called inside the operator: a compiled graph runs it too, and padding is gone by then, so that
    it may have held anything.
    """
    if log_decay is not None and bool((log_decay > 0).any()):  # NaN goes through
        raise ValueError(f"log_decay must be at most 0, got {_largest(log_decay)}")
    edges = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    if edges[0] != 0 or edges[-1] != length or sorted(edges) != edges:
        raise ValueError(f"cu_seqlens must rise from 0 to the packed length {length}, got {edges}")
    for start, stop in itertools.pairwise(edges):
        own = mask if cu_seqlens is None or stop == start else mask.for_length(stop - start)
        if profile is not None:
            limit = own.geometry.num_profiles
            _check_range("profile", profile[:, start:stop], limit, f" for {own.describe()}")
        if query_type is not None:
            limit = own.geometry.num_types
            inside = slice(start, stop)
            if positions is not None:
                inside = slice(*torch.searchsorted(positions, positions.new_tensor([start, stop])))
            _check_range("query_type", query_type[:, inside], limit, f" for {own.describe()}")


def _check_range(name: str, index: Tensor, limit: int, whose: str = "") -> None:
    if not bool(((index >= 0) & (index < limit)).all()):
        raise ValueError(
            f"{name} must lie in [0, {limit}){whose}, got values from {_smallest(index)} to "
            f"{_largest(index)}"
        )


def _largest(x: Tensor) -> float | int:
    return x.max().item() if x.numel() else 0


def _smallest(x: Tensor) -> float | int:
    return x.min().item() if x.numel() else 0


def one_per_head(
    q: Tensor, k: Tensor, v: Tensor, key_gate: Tensor | None, *gates: Tensor | None
) -> tuple[Any, ...]:
    """Give keys, values and gates the heads that they need: q, k, v, the key gate, the others.

    If a gate differs between query heads, keys and values do. Where heads of values share a key,
    only the key gate tells keys apart.
    """
    num_heads = max(q.shape[2], v.shape[2])
    if v.shape[2] > k.shape[2]:
        if key_gate is not None and key_gate.shape[2] > k.shape[2]:
            q, k = repeat_heads(q, num_heads), repeat_heads(k, num_heads)
        return q, k, v, key_gate, *(repeat_heads(x, num_heads) for x in gates)
    keys = (k, v, key_gate, *gates)
    if len({x.shape[2] for x in keys if x is not None}) > 1:
        keys = tuple(repeat_heads(x, num_heads) for x in keys)
    return q, *keys


def repeat_heads(x: Any, num_heads: int) -> Any:
    """Repeat each head of (B, T, heads, ...) as often as it takes to have so many; None stays."""
    if x is None or x.shape[2] == num_heads:
        return x
    return x.repeat_interleave(num_heads // x.shape[2], 2)
