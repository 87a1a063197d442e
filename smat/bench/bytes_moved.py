"""Bytes that a call of the op moves, beside the least that the algorithm needs; a roofline.

Nothing here was measured: bytes are counted from the kernels' launches, and times that follow from
them and from published figures of a device are estimates, which a real run can only exceed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from smat.bench.launches import DTYPES, Call, Case, backward_call, forward_call, launches_of
from smat.bench.traffic import WORD, Cuts, Traffic, bytes_of
from smat.ops.linear import plan as planning
from smat.ops.linear.chunks import CHUNK
from smat.ops.smat.attention import segments_of
from smat.ops.smat.routing import Options

TORCH = "torch"  # its own operations, between launches


class Peak(NamedTuple):
    """What a device's maker publishes: bytes and TF32 (AMD: fp32 matrix) operations a second."""

    bandwidth: float
    operations: float


PEAKS = {
    "a100": Peak(2.039e12, 156e12),  # 80 GB, SXM
    "h100": Peak(3.35e12, 494.7e12),  # SXM
    "mi300x": Peak(5.3e12, 163.4e12),
}


def count_all(
    vc_dims: Sequence[int], seq_len: int, width: int, dtypes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Count every case, forward and backward, without gates and with them: one head."""
    for dtype, vc_dim, gated in product(dtypes, vc_dims, (False, True)):
        case = Case(vc_dim, seq_len, width, dtype, gated)
        for backward in (False, True):
            found = op_bytes(case, (backward_call if backward else forward_call)(case))
            total = sum(each.total for name, each in found.items() if name != TORCH)
            around, least = found[TORCH].total, least_bytes(case, backward)
            yield {
                "name": case.name,
                "pass": "backward" if backward else "forward",
                "dtype": dtype,
                "chunk": chunk_of(case),
                "moved_bytes": total,
                "least_bytes": least,
                "ratio_to_least": total / least,
                "torch_bytes": around,
                "by_kernel": {name: each._asdict() for name, each in found.items()},
                **{
                    f"estimate_{name}": estimate(case, backward, total + around, peak)
                    for name, peak in PEAKS.items()
                },
            }


def op_bytes(case: Case, call: Call) -> dict[str, Traffic]:
    """Sum up the bytes of a call by kernel, and those of torch's own operations."""
    cuts, found = cuts_of(case), dict[str, Traffic]()
    with TorchBytes() as others:
        launches = launches_of(call)
    for launch in launches:
        found[launch.name] = found.get(launch.name, Traffic(0, 0)) + bytes_of(launch, cuts)
    return {**found, TORCH: others.found}


def cuts_of(case: Case) -> Cuts:
    """Cut a case's sequence as the kernels do."""
    segments = segments_of(case.inputs(), Options(case.mask), case.mask, case.seq_len)
    plan = planning.make_plan(tuple(segments), chunk_of(case), torch.device("cpu"))
    return Cuts.of(plan.chunks, plan.windows)


def chunk_of(case: Case) -> int:
    """Tokens of a chunk, as the kernels cut."""
    return planning.chunk_of(DTYPES[case.dtype])


class TorchBytes(TorchDispatchMode):
    """What torch's operations read and write between launches; views and new memory are neither."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Traffic(0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        free = func.is_view or any(word in func.name() for word in ("empty", "detach"))
        if not free:
            given, made = (_size(tree_leaves(x)) for x in ((args, kwargs), out))
            self.found += Traffic(given, made)
        return out


def _size(leaves: list[Any]) -> int:
    return sum(x.numel() * x.element_size() for x in leaves if isinstance(x, torch.Tensor))


def least_bytes(case: Case, backward: bool) -> int:
    """Inputs and outputs once; chunk states, profile and type table written once and read once.

    Chunks of 64 tokens, also where the kernels take shorter ones, as they do in fp32. The backward
    pass has each of these tables twice: what was known, and its gradient.
    """
    element, tokens, width = DTYPES[case.dtype].itemsize, case.heads * case.seq_len, case.width
    inputs = tokens * (3 * width * element + case.gated * (WORD + element))
    answers = tokens * WORD * (width + 1)
    geometry, states = case.mask.geometry, -(-case.seq_len // CHUNK)
    if case.vc_dim > 1:
        states += geometry.num_profiles + geometry.num_types
    tables = 2 * WORD * case.heads * states * width * (width + 1)
    if not backward:
        return inputs + answers + tables
    return 2 * inputs + tokens * width * element + answers + 2 * tables


def estimate(case: Case, backward: bool, num_bytes: int, peak: Peak) -> float:
    """Estimate milliseconds: the longer of moving the bytes and making the products.

    Products, of one head: states and their reads 4 T K V, tiles 2 T c (K + V), pool and read
    2 T K V; the backward pass makes about 2.5 times as many. fp32 takes three parts of TF32.
    """
    width, chunk = case.width, chunk_of(case)
    each = 4 * width**2 + 4 * chunk * width + 2 * width**2 * (case.vc_dim > 1)
    products = each * case.seq_len * case.heads * (2.5 if backward else 1)
    parts = 3 if case.dtype == "fp32" else 1
    return 1e3 * max(num_bytes / peak.bandwidth, parts * products / peak.operations)
