"""The gated delta rule on a CPU: how its kernels are called (extension appendix, GDN)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from smat.ops.backend import choose_backend
from smat.ops.delta_rule.chunks import compute_dtype
from smat.ops.linear.decay import FORGETS
from smat.ops.native.arguments import Array, along_rows, array, num_threads
from smat.ops.native.build import load

SOURCE, BACKWARD_SOURCE = "delta_rule/native/rule.cpp", "delta_rule/native/rule_backward.cpp"
CHUNK = 32  # tokens: fewer operations than 64, and tiles that stay in the first cache
HEADS_AT_ONCE = 4  # heads of a task, whose states should stay in cache
INPUTS = ("q", "k", "v", "beta", "log_decay")
GRADS = ("grad_q", "grad_k", "grad_v", "grad_beta", "grad_decay")
ARRAYS = ("q", "k", "v", "beta", "grad_out", "log_decay", "out", *GRADS)
POINTERS = ("first", "last", "kept", "scratch")
NUMBERS = (
    "batch", "length", "heads", "key_dim", "value_dim", "block_size", "chunk_size",
    "scratch_size", "threads", "heads_at_once",
)  # fmt: skip


class Call(ctypes.Structure):
    """The arguments of a kernel, in the order of `chunk.h`."""

    _fields_ = (
        *((name, Array) for name in ARRAYS),
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_int64) for name in NUMBERS),
    )


def takes(k: Tensor, source: str) -> bool:
    """Whether the kernels work off keys (B, T, H, K), which compiles them if need be."""
    chosen = choose_backend("auto", k.device, tokens=k.shape[:3].numel())
    return chosen.name == "native" and load(source) is not None


def forward(
    given: Sequence[Tensor], scale: float, chunk_size: int, keep_states: bool
) -> list[Tensor]:
    """Return the output, the last state and, if wanted, those before all chunks."""
    *by_token, initial_state = given
    k, v = by_token[1], by_token[2]
    dtype, num_chunks = compute_dtype(*given[:3], initial_state), -(-k.shape[1] // chunk_size)
    out = k.new_empty(*k.shape[:3], initial_state.shape[-1], dtype=dtype)
    first = initial_state.to(dtype).contiguous()
    last = torch.empty_like(first)
    kept = first.new_empty(num_chunks if keep_states else 0, len(k) * k.shape[2], *first.shape[2:])
    states = {"first": first, "last": last, "kept": kept if keep_states else None}
    _run(SOURCE, by_token, {"out": out}, states, scale, chunk_size)
    return [out.to(v.dtype if v.shape[-1] else k.dtype), last, kept]


def backward(tensors: Sequence[Tensor], scale: float, chunk_size: int) -> list[Tensor]:
    """Return the gradients of all inputs, from the states before all chunks."""
    *by_token, _, kept, grad_out, grad_final = tensors
    grads = [x.new_empty(x.shape, dtype=kept.dtype) for x in by_token]
    first = grad_final.to(kept.dtype).contiguous()
    last = torch.empty_like(first)
    arrays = {"grad_out": along_rows(grad_out, kept.dtype)}
    arrays |= dict(zip(GRADS, grads, strict=True))
    states = {"first": first, "last": last, "kept": kept.contiguous()}
    _run(BACKWARD_SOURCE, by_token, arrays, states, scale, chunk_size)
    grads[4].masked_fill_(by_token[4] <= FORGETS, 0.0)
    return [grad.to(x.dtype) for grad, x in zip([*grads, last], tensors[:6], strict=True)]


def _run(
    source: str,
    by_token: Sequence[Tensor],
    arrays: dict[str, Tensor],
    states: Mapping[str, Tensor | None],
    scale: float,
    chunk_size: int,
) -> None:
    """Call a kernel with scratch memory for each of its threads."""
    first = states["first"]
    assert first is not None
    wide = [x if x is None else along_rows(x, first.dtype) for x in by_token[:4]]
    gates = by_token[4].double().clamp(min=FORGETS)
    tensors = dict(zip(INPUTS, (*wide, gates), strict=True)) | arrays
    batch, length, heads, key_dim = by_token[1].shape
    work = batch * length * heads * key_dim * (3 * first.shape[-1] + 2 * CHUNK)
    threads = min(num_threads(work), batch * heads)
    call = Call(
        **{name: array(x if x.numel() else None) for name, x in tensors.items()},
        **{name: None if x is None else x.data_ptr() for name, x in states.items()},
        scale=scale, batch=batch, length=length, heads=heads, key_dim=key_dim,
        value_dim=first.shape[-1], block_size=chunk_size, chunk_size=min(CHUNK, chunk_size),
        threads=threads, heads_at_once=max(1, min(HEADS_AT_ONCE, batch * heads // threads, heads)),
    )  # fmt: skip
    library, kind = load(source), str(first.dtype).removeprefix("torch.")
    assert library is not None
    measure = getattr(library, f"scratch_{kind}")
    measure.restype = ctypes.c_int64
    call.scratch_size = measure(ctypes.byref(call))
    scratch = first.new_empty(call.scratch_size * call.threads)
    call.scratch = scratch.data_ptr()
    getattr(library, f"run_{kind}")(ctypes.byref(call))
