"""Note which kernels a call launches, with which arguments, where no kernel can run.

Tensors have no memory here: the kernels' host side needs none, since it never waits for a value.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import smat
from smat.extras import require
from smat.ops.smat.routing import Gates, Inputs, Options, Routing
from smat.ops.triton.launch import Launch, record_launches

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NUM_READS = 4  # of a routed query
Call = Callable[[], object]


class Case(NamedTuple):
    """A call of the op: its sizes, and what it is given beside q, k and v.

    >>> Case(vc_dim=3, gated=True).name
    'd=3 gated'
    """

    vc_dim: int = 3
    seq_len: int = 65536
    width: int = 64  # K = V
    dtype: str = "bf16"
    gated: bool = False
    routed: bool = False  # by content, with NUM_READS weighted reads
    heads: int = 1
    group: int = 1
    window_step: int | None = None

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"d={self.vc_dim}{' gated' * self.gated}{' routed' * self.routed}"

    @property
    def mask(self) -> smat.SMatMask:
        """The mask; whether VC = d is guaranteed makes no difference to its cost."""
        step = self.window_step
        boundary = None if step is None else smat.schedules.window(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", smat.SMatWarning)
            return smat.SMatMask(self.seq_len, self.vc_dim, 64, boundary=boundary)

    def inputs(self, seq_len: int | None = None, device: str = "meta") -> Inputs:
        """Tensors of the sizes, (1, T, heads, .)."""
        length, geometry = seq_len or self.seq_len, self.mask.geometry
        options: dict[str, Any] = {"device": device, "dtype": DTYPES[self.dtype]}
        shape, answers = (1, length, self.heads), (1, length, self.heads * self.group)
        q = torch.rand(*answers, self.width, **options)
        k, v = torch.rand(2, *shape, self.width, **options)
        gates, routing = Gates(), Routing()
        if self.gated:
            gates = Gates(-torch.rand(shape, device=device), torch.rand(shape, **options))
        if self.routed:
            reads = (*answers, NUM_READS)
            routing = Routing(
                torch.randint(geometry.num_profiles, shape, device=device),
                torch.randint(geometry.num_types, reads, device=device),
                torch.rand(shape, device=device),
                torch.rand(reads, device=device),
            )
        return Inputs(q, k, v, gates, routing)


def forward_call(case: Case) -> Call:
    """Prepare a call of the op."""
    attention = require("smat.ops.smat.triton.attention", "gpu")
    return partial(attention.attend, case.inputs(), Options(case.mask))


def backward_call(case: Case) -> Call:
    """Prepare its backward pass."""
    attention = require("smat.ops.smat.triton.attention", "gpu")
    inputs = case.inputs()
    out = inputs.v.new_empty(*inputs.q.shape[:3], case.width, dtype=torch.float32)
    grad_out = torch.empty_like(out, dtype=inputs.v.dtype)
    return partial(
        attention.attend_backward, inputs, Options(case.mask), grad_out, out, out[..., 0]
    )


def step_call(case: Case) -> Call:
    """Prepare one decoded token."""
    decode = require("smat.ops.smat.triton.decode", "gpu")
    sizes = case.heads, case.width, case.width
    state = smat.SMatState.empty(
        case.mask, 1, *sizes, query_heads=case.heads * case.group, weighted=case.routed
    )
    q, k, v, gates, routing, _ = case.inputs(1, "cpu")
    token = Gates(*(None if x is None else x[:, 0] for x in gates))
    where = Routing(*(None if x is None else x[:, 0] for x in routing))
    step = decode.FusedStep(state, gated=case.gated)
    return partial(step.launch, q[:, 0], k[:, 0], v[:, 0], token, where)


def launches_of(call: Call) -> list[Launch]:
    """List what a call launches, without running it."""
    with record_launches(run=False) as launches:
        call()
    return launches
