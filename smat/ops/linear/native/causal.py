"""The causal branch on a CPU: how its kernels are called (equation 8, adjoint 12)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smat.masks import Segment
from smat.ops.feature_maps import POINTWISE
from smat.ops.linear.decay import FORGETS
from smat.ops.linear.plan import make_plan
from smat.ops.native.arguments import Array, along_rows, array, num_threads
from smat.ops.native.build import load

SOURCE, BACKWARD_SOURCE = "linear/native/causal.cpp", "linear/native/causal_backward.cpp"
CHUNK = 32  # tokens: fewer operations than 64, and tiles that stay in the first cache
HEADS_AT_ONCE = 4  # key heads of a task, whose states should stay in cache
CPU = torch.device("cpu")
ARRAYS = (
    "q", "k", "v", "key_gate", "grad_out", "log_decay", "out", "normalizer", "inverse", "column",
    "grad_q", "grad_k", "grad_v", "grad_decay", "grad_gate",
)  # fmt: skip
POINTERS = ("chunks", "spans", "scratch")
NUMBERS = (
    "num_spans", "batch", "key_heads", "group", "share", "slices", "key_dim", "value_dim",
    "chunk_size", "num_slots", "scratch_size", "map", "normalize", "threads", "part_q", "part_k",
    "part_gate", "adds", "heads_at_once", "most_chunks",
)  # fmt: skip


class Call(ctypes.Structure):
    """The arguments of a kernel, in the order of `chunk.h`."""

    _fields_ = (
        *((name, Array) for name in ARRAYS),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in NUMBERS),
    )


class Spans(NamedTuple):
    """Chunks of packed sequences, and the spans of them that no window crosses."""

    chunks: Tensor  # (C, 5): first token, end, first and last window, whether keys are distant
    starts: Tensor  # (S + 1,): the first chunk of each span, and the end
    num_slots: int  # windows that are open at once
    num_visits: int  # of chunks by windows


@lru_cache(maxsize=64)
def cut_spans(sequences: tuple[tuple[int, tuple[Segment, ...]], ...], chunk: int) -> Spans:
    """Cut sequences, each given by its first token and its segments.

    >>> spans = cut_spans(((0, (Segment(0, 3, 0), Segment(3, 5, 3))), (5, (Segment(0, 1, 0),))), 2)
    >>> spans.chunks.tolist()
    [[0, 2, 0, 0, 0], [2, 3, 0, 0, 0], [3, 5, 1, 1, 1], [5, 6, 2, 2, 0]]
    >>> spans.starts.tolist(), spans.num_slots, spans.num_visits
    ([0, 2, 3, 4], 1, 4)
    """
    chunks: list[list[int]] = []
    starts: list[int] = []
    num_windows = num_visits = 0
    for offset, segments in sequences:
        plan = make_plan(segments, chunk, CPU)
        windows = plan.windows.tolist()
        for number, (start, stop, first, last) in enumerate(plan.chunks.tolist()):
            begin = windows[first][0]
            if begin == number:
                starts.append(len(chunks))
            visiting = (first + num_windows, last + num_windows)
            chunks.append([start + offset, stop + offset, *visiting, int(begin > 0)])
        num_windows += len(windows)
        num_visits += plan.num_visits
    num_slots = max(last - first + 1 for _, _, first, last, _ in chunks)
    with torch.inference_mode(False):
        edges = torch.tensor([*starts, len(chunks)])
        return Spans(torch.tensor(chunks), edges, num_slots, num_visits)


def is_available(backward: bool = False) -> bool:
    """Whether the kernels are here, which compiles them if need be."""
    return load(BACKWARD_SOURCE if backward else SOURCE) is not None


class Causal:
    """The causal branch of packed sequences, whose tensors stay in the caller's layout.

    q (B, T, Hq, K), k (B, T, Hk, K), v (B, T, Hv, V), log_decay (B, T, Hv), key_gate (B, T, Hk);
    half precision is widened.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        key_gate: Tensor | None,
        sequences: Sequence[tuple[int, tuple[Segment, ...]]],
        feature_map: str,
        normalize: bool,
    ) -> None:
        self.dtype = torch.promote_types(v.dtype, torch.float32)
        wide = [None if x is None else along_rows(x, self.dtype) for x in (q, k, v, key_gate)]
        gates = None if log_decay is None else log_decay.double().clamp(min=FORGETS)
        self.tensors = dict(zip(("q", "k", "v", "key_gate"), wide, strict=True))
        self.tensors["log_decay"] = gates
        self.spans = cut_spans(tuple(sequences), CHUNK)
        batch, length, key_heads, key_dim = k.shape
        group, share = q.shape[2] // key_heads, v.shape[2] // key_heads
        state = key_dim * v.shape[-1]
        work = batch * length * max(q.shape[2], v.shape[2]) * (2 * state + CHUNK * key_dim)
        threads = num_threads(work)
        tasks = batch * key_heads * (len(self.spans.starts) - 1)
        together = max(1, min(HEADS_AT_ONCE, key_heads, tasks // threads))
        self.numbers: dict[str, Any] = {
            "chunks": self.spans.chunks.data_ptr(), "spans": self.spans.starts.data_ptr(),
            "num_spans": len(self.spans.starts) - 1, "batch": batch, "key_heads": key_heads,
            "group": group, "share": share, "key_dim": key_dim, "value_dim": v.shape[-1],
            "slices": max(1, min(-(-threads // tasks), max(group, share))),
            "chunk_size": CHUNK, "num_slots": self.spans.num_slots,
            "map": POINTWISE.index(feature_map), "normalize": normalize, "threads": threads,
            "heads_at_once": together, "most_chunks": int(self.spans.starts.diff().max()),
        }  # fmt: skip

    def attend(self, out: Tensor, normalizer: Tensor, adds: bool) -> None:
        """Write the output (B, T, H, V), divided, and the normaliser (B, T, H).

        ``adds``: for queries with distant keys, both hold what these contribute.
        """
        self.numbers["adds"] = adds
        library = load(SOURCE)
        assert library is not None
        self._run(library, "attend", {"out": out, "normalizer": normalizer})

    def backward(
        self, grad_out: Tensor, out: Tensor, normalizer: Tensor, grads: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Write the gradients of q, k, v and of those gates there are, by name.

        Return those of the numerator as a factor of ``grad_out`` and of the normaliser, (B, T, H)
        each; both are left as they are if there is no division.
        """
        library = load(BACKWARD_SOURCE)
        assert library is not None
        if self.numbers["group"] > 1:  # heads of queries add to one gradient
            self.numbers["slices"] = 1
        inverse, column = torch.empty_like(normalizer), torch.empty_like(normalizer)
        parts = {name: self._in_parts(name, grads) for name in ("q", "k", "key_gate")}
        self.numbers |= {
            f"part_{name.removeprefix('key_')}": 0 if x is None else x.stride(0)
            for name, x in parts.items()
        }
        given = {
            "grad_out": along_rows(grad_out, self.dtype), "out": out, "normalizer": normalizer,
            "inverse": inverse, "column": column, "grad_v": grads["v"],
            "grad_decay": grads.get("log_decay"),
            "grad_gate": None if parts["key_gate"] is None else parts["key_gate"][0],
            **{f"grad_{name}": parts[name][0] for name in "qk"},  # type: ignore[index]
        }  # fmt: skip
        self._run(library, "attend_backward", given)
        for name, x in parts.items():
            if x is not None and len(x) > 1:
                torch.sum(x, 0, out=grads[name])
        return inverse, column

    def _in_parts(self, name: str, grads: dict[str, Tensor]) -> Tensor | None:
        """Make room for what each slice of heads contributes, (slices, B, T, heads, ...)."""
        grad, slices = grads.get(name), self.numbers["slices"]
        if grad is None or slices == 1:
            return None if grad is None else grad.unsqueeze(0)
        return grad.new_empty(slices, *grad.shape)

    def _run(self, library: ctypes.CDLL, name: str, tensors: dict[str, Tensor | None]) -> None:
        """Call a kernel with scratch memory for each of its threads."""
        arrays = {name: array(x) for name, x in (self.tensors | tensors).items()}
        call, kind = Call(**arrays, **self.numbers), str(self.dtype).removeprefix("torch.")
        measure = getattr(library, f"scratch_{kind}")
        measure.restype = ctypes.c_int64
        call.scratch_size = measure(ctypes.byref(call))
        scratch = torch.empty(call.scratch_size * call.threads, dtype=self.dtype)
        call.scratch = scratch.data_ptr()
        getattr(library, f"{name}_{kind}")(ctypes.byref(call))
