"""Kernels of other libraries that a GPU can be timed with: flash-linear-attention, mamba_ssm.

They run on GPUs alone and none of them is required: what is not installed is not timed, and what is
refused (a dtype, a length) is named in the record.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.bench.measure import forward_backward
from smat.ops.delta_rule.reference import delta_rule_reference

TOLERANCE = 2e-2  # of an output in half precision: the right thing is timed
CHECK_LEN = 200
Inputs = dict[str, Tensor]


class Peer(NamedTuple):
    """An operation of another library, and what it computes, as `delta_rule_reference` has it."""

    name: str
    module: str
    call: Callable[..., Tensor]  # of the module and of q, k, v, log_decay, beta
    gated: bool = False
    erases: bool = False  # with beta
    weighs: bool = False  # values, by -log_decay

    def take(self, inputs: Inputs) -> Inputs:
        """Prepare inputs (B, T, H, .): keys of length 1, a write strength of a half."""
        taken = {name: x.detach() for name, x in inputs.items()}
        taken["k"] = F.normalize(taken["k"].float(), dim=-1).to(taken["k"].dtype)
        taken["beta"] = torch.full_like(taken["log_decay"], 0.5)
        left_out = {"log_decay": self.gated, "beta": self.erases}
        taken = {name: x for name, x in taken.items() if left_out.get(name, True)}
        needs = any(x.requires_grad for x in inputs.values())
        return {name: x.requires_grad_(needs and name != "grad_out") for name, x in taken.items()}

    def bind(self, inputs: Inputs) -> Callable[[], dict[str, Tensor]]:
        """Prepare a call, with its backward pass if the inputs want one."""
        operation = partial(self.call, import_module(self.module))
        return partial(forward_backward, operation, self.take(inputs))

    def check(self, inputs: Inputs) -> dict[str, Any]:
        """Hold the output against the oracle in fp64."""
        taken = self.take({name: x[:, :CHECK_LEN] for name, x in inputs.items()})
        exact = {name: x.detach().double() for name, x in taken.items() if name != "grad_out"}
        found = self.call(import_module(self.module), **{name: taken[name] for name in exact})
        if self.weighs:
            exact["v"] = exact["v"] * -exact["log_decay"].unsqueeze(-1)
        q, k, v = (exact[name] for name in "qkv")
        right, _ = delta_rule_reference(
            q, k, v, exact.get("beta"), exact.get("log_decay"), scale=1.0
        )
        error = (found.detach().double() - right).norm() / right.norm()
        size = f"T = {taken['k'].shape[1]}"
        checked = {"name": self.name, "quantity": "output", "size": size}
        return {**checked, "error": float(error), "tolerance": TOLERANCE}


def linear(fla: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor:
    """Linear attention, perhaps with one gate a head."""
    return fla.chunk_simple_gla(q, k, v, g=log_decay, scale=1.0)[0]


def delta_net(fla: Any, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """The delta rule."""
    return fla.chunk_delta_rule(q, k, v, beta, scale=1.0)[0]


def gated_delta_net(
    fla: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """The gated delta rule."""
    return fla.chunk_gated_delta_rule(q, k, v, log_decay, beta, scale=1.0)[0]


def mamba2(mamba_ssm: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    """The scan of Mamba-2 with A = -1 and the time step -log_decay, which weighs values too."""
    rate = torch.full((v.shape[2],), -1.0, device=v.device)
    return mamba_ssm.mamba_chunk_scan_combined(v, -log_decay, rate, k, q, chunk_size=256)


PEERS = (
    Peer("linear attention (fla)", "fla.ops.simple_gla", linear),
    Peer("gated linear attention (fla)", "fla.ops.simple_gla", linear, gated=True),
    Peer("DeltaNet (fla)", "fla.ops.delta_rule", delta_net, erases=True),
    Peer("Gated DeltaNet (fla)", "fla.ops.gated_delta_rule", gated_delta_net, True, True),
    Peer("Mamba-2 (mamba_ssm)", "mamba_ssm.ops.triton.ssd_combined", mamba2, True, weighs=True),
)


def installed_peers(device: torch.device) -> list[Peer]:
    """List the peers that can be timed: on a GPU, those whose library is there."""
    if device.type != "cuda":
        return []
    return [peer for peer in PEERS if find_spec(peer.module.partition(".")[0]) is not None]


def willing_peers(
    device: torch.device, inputs: Inputs
) -> tuple[list[Peer], list[dict[str, Any]], list[dict[str, Any]]]:
    """Check the peers on some inputs: those that take them, their checks, and why others do not."""
    willing, checks, refused = [], [], []
    for peer in installed_peers(device):
        try:
            checks.append(peer.check(inputs))
            willing.append(peer)
        except (AssertionError, ImportError, RuntimeError, TypeError, ValueError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            refused.append({"name": peer.name, "why": lines[0]})
    return willing, checks, refused
