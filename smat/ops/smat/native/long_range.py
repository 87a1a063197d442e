"""The long-range branch on a CPU: how its kernels are called (equation 6, adjoint 11).

The torch form, which says how gates and moving boundaries enter, is `smat.ops.smat.long_range`.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smat.masks import Segment
from smat.ops.feature_maps import POINTWISE
from smat.ops.linear.decay import LogDecay
from smat.ops.native.arguments import Array, along_rows, array, num_threads
from smat.ops.native.build import load
from smat.ops.smat.long_range import decay_backward
from smat.ops.smat.routing import Inputs, Options

SOURCE = "smat/native/long_range.cpp"
NUM_ROLES = 12  # buffers of a unit of work
ARRAYS = (
    "q", "k", "v", "key_gate", "write_weight", "read_weight", "until", "since", "profile",
    "query_type", "out", "normalizer", "grad_out", "grad_q", "grad_k", "grad_v", "grad_key_gate",
    "grad_write_weight", "grad_read_weight", "by_query", "by_key",
)  # fmt: skip
POINTERS = ("moves", "key_stop", "query_start", "query_stop", "work")
NUMBERS = (
    "batch", "key_heads", "query_heads", "value_heads", "key_dim", "value_dim", "reads", "length",
    "num_distant", "first", "num_folds", "field_size", "ambient_dim", "first_type", "map",
    "normalize", "backward", "num_threads", "num_splits",
)  # fmt: skip


class Call(ctypes.Structure):
    """The arguments of a kernel, in the order of `rows.h`."""

    _fields_ = (
        *((name, Array) for name in ARRAYS),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in NUMBERS),
    )


class Folds(NamedTuple):
    """The segments with distant keys, one entry each, and their edges for every token."""

    key_stop: Tensor
    query_start: Tensor
    query_stop: Tensor
    key_edge: Tensor  # (n,): the boundary at which each key becomes distant
    query_edge: Tensor  # (T - first,): the boundary of each query

    @property
    def num_distant(self) -> int:
        """The number of keys that are ever distant."""
        return len(self.key_edge)


@lru_cache(maxsize=64)
def find_folds(segments: tuple[Segment, ...]) -> Folds:
    """List the folds of a sequence.

    >>> find_folds((Segment(0, 3, 0), Segment(3, 5, 2), Segment(5, 6, 3))).key_edge
    tensor([2, 2, 3])
    """
    with torch.inference_mode(False):
        moving = torch.tensor([x for x in segments if x.boundary > 0])
        start, stop, boundary = moving.T.contiguous()
        new = boundary.diff(prepend=boundary.new_zeros(1))
        return Folds(
            boundary, start, stop,
            boundary.repeat_interleave(new), boundary.repeat_interleave(stop - start),
        )  # fmt: skip


class LongRange:
    """The long range of one sequence, whose tensors stay in the caller's layout."""

    def __init__(self, inputs: Inputs, options: Options, segments: tuple[Segment, ...]) -> None:
        self.inputs, self.options, self.folds = inputs, options, find_folds(segments)
        self.dtype = torch.promote_types(inputs.v.dtype, torch.float32)
        q, k, v, gates, routing = inputs[:5]
        geometry, n = options.mask.geometry, self.folds.num_distant
        types, weight = routing.query_type, routing.read_weight
        self.reads = types.shape[3] if types is not None and types.ndim == 4 else 1
        self.first = k.shape[1] - len(self.folds.query_edge)
        self.tensors: dict[str, Tensor | None] = {
            "q": self._wide(q), "k": self._wide(k), "v": self._wide(v),
            "key_gate": self._wide(gates.key_gate),
            "write_weight": self._wide(routing.write_weight),
            "read_weight": None if weight is None else self._wide(_by_read(weight)),
            "profile": None if routing.profile is None else routing.profile.long(),
            "query_type": None if types is None else along_rows(_by_read(types), torch.long),
        }  # fmt: skip
        decay = gates.log_decay if options.decay_scope == "all" else None
        self.moves = None if decay is None else self._decay(LogDecay.of(decay.transpose(1, 2)))
        self.num_heads = k.shape[0] * k.shape[2]
        visits = len(self.folds.query_edge) * self.reads * max(q.shape[2], v.shape[2])
        shears = len(self.folds.key_stop) * max(0, geometry.ambient_dim - 1) * geometry.num_profiles
        entries = (n + shears * geometry.field_size // 4) * v.shape[2] + visits
        self.threads = num_threads(k.shape[0] * entries * k.shape[3] * v.shape[3])
        self.numbers: dict[str, Any] = {
            "batch": k.shape[0], "key_heads": k.shape[2], "query_heads": q.shape[2],
            "value_heads": v.shape[2], "key_dim": k.shape[3], "value_dim": v.shape[3],
            "reads": self.reads, "length": k.shape[1], "num_distant": n, "first": self.first,
            "num_folds": len(self.folds.key_stop), "field_size": geometry.field_size,
            "ambient_dim": geometry.ambient_dim, "first_type": 1 - options.mask.anchor,
            "map": POINTWISE.index(options.feature_map), "normalize": options.normalize,
            "num_threads": self.threads,
        }  # fmt: skip

    def _wide(self, x: Tensor | None) -> Tensor | None:
        return None if x is None else along_rows(x, self.dtype)

    def _decay(self, decay: LogDecay) -> Tensor:
        """What gates leave of keys, until, and of tables, since, and at every move (B, Hv, F)."""
        folds, length = self.folds, self.inputs.k.shape[1]
        own = torch.arange(1, length + 1)
        until = decay.between(folds.key_edge, own[: folds.num_distant], self.dtype)
        since = decay.between(own[self.first :], folds.query_edge, self.dtype)
        self.tensors["until"], self.tensors["since"] = until.mT, since.mT
        before = folds.key_stop.roll(1)
        before[0] = 0
        return decay.between(folds.key_stop, before, self.dtype).contiguous()

    def run(self, tensors: dict[str, Tensor], backward: bool) -> None:
        """Call the kernel, with buffers for each unit that works at a time."""
        library = load(SOURCE)
        assert library is not None
        kind = str(self.dtype).removeprefix("torch.")
        arrays = {name: array(x) for name, x in (self.tensors | tensors).items()}
        folds = {name: getattr(self.folds, name).data_ptr() for name in POINTERS[1:4]}
        call = Call(**arrays, **folds, **self.numbers, backward=backward)
        call.moves = None if self.moves is None else self.moves.data_ptr()
        call.num_splits = self._num_splits()
        num_units = self.threads if call.num_splits == 1 else self.num_heads * call.num_splits
        sizes = (ctypes.c_int64 * NUM_ROLES)()
        getattr(library, f"work_{kind}")(ctypes.byref(call), sizes)
        buffers = [torch.empty(size, dtype=self.dtype) for _ in range(num_units) for size in sizes]
        work = (ctypes.c_void_p * len(buffers))(*(x.data_ptr() for x in buffers))
        call.work = ctypes.addressof(work)
        getattr(library, f"long_range_{kind}")(ctypes.byref(call))

    def _num_splits(self) -> int:
        """Choose in how many parts the columns of a head are worked off, if heads are few."""
        lanes = 64 // self.dtype.itemsize
        tiles = -(-self.inputs.v.shape[3] // lanes)
        return max(1, min(tiles, -(-self.threads // max(1, self.num_heads))))


def _by_read(x: Tensor) -> Tensor:
    """Give (B, T, H) a dimension of reads."""
    return x.unsqueeze(-1) if x.ndim == 3 else x


def long_range(
    inputs: Inputs,
    options: Options,
    segments: tuple[Segment, ...],
    out: Tensor,
    normalizer: Tensor,
) -> None:
    """Write what queries of one sequence see of distant keys: the numerator, the normaliser.

    Of the output (B, T, H, V) and (B, T, H), the rows before the first such query are left alone.
    """
    call = LongRange(inputs, options, segments)
    call.run({"out": out, "normalizer": normalizer}, backward=False)


def long_range_backward(
    inputs: Inputs,
    options: Options,
    segments: tuple[Segment, ...],
    grad_out: Tensor,
    out: Tensor,
    normalizer: Tensor,
    grads: dict[str, Tensor],
) -> None:
    """Add to the gradients of one sequence, by name, what the long range gives: fp32 or wider.

    Given are the output and the normaliser of both branches, and the gradient of that output.
    """
    call = LongRange(inputs, options, segments)
    tensors = {"grad_out": along_rows(grad_out, call.dtype), "out": out, "normalizer": normalizer}
    tensors |= {f"grad_{name}": grad for name, grad in grads.items() if name != "log_decay"}
    if "read_weight" in grads:
        tensors["grad_read_weight"] = _by_read(grads["read_weight"])
    if call.moves is None:
        call.run(tensors, backward=True)
        return
    gates = inputs.gates.log_decay
    assert gates is not None
    by_query, by_key = (torch.zeros(gates.shape, dtype=call.dtype) for _ in range(2))
    seen = {"by_query": by_query[:, call.first :], "by_key": by_key}
    call.run(tensors | seen, backward=True)
    asked, took = (x.transpose(1, 2).flatten(0, 1) for x in (by_query, by_key))
    moved = decay_backward(asked, took, call.folds.num_distant)
    grads["log_decay"] += moved.view(len(gates), gates.shape[2], -1).transpose(1, 2)
