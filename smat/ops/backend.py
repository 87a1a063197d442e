"""One place picks the implementation of the op, forward and backward.

"torch" is complete, runs everywhere and is written to be read. "triton" is for GPUs, "native" for
CPUs with a C++ compiler.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smat.extras import missing_extra
from smat.ops.native.build import SWITCH, why_not
from smat.ops.smat import attention
from smat.ops.smat.step import step_token

NATIVE_TOKENS = 1 << 12  # tokens x heads of a call that is worth compiling kernels for

_log = logging.getLogger("smat")


class Backend(NamedTuple):
    """The op, as one implementation has it."""

    name: str
    devices: tuple[str, ...]  # none: every device
    attend: Callable[..., tuple[Tensor, Tensor]]  # of inputs and options: output, normaliser
    attend_backward: Callable[..., dict[str, Tensor]]  # and of their gradient: all by name
    step: Callable[..., Tensor]  # of a state and a token: its output

    def runs_on(self, device: torch.device) -> bool:
        """Whether it takes tensors on a device."""
        return not self.devices or device.type in self.devices


def _later(module: str, name: str) -> Callable[..., Any]:
    """Name a function of the kernels; they are imported where they are first called."""

    def call(*args: Any) -> Any:
        return getattr(import_module(f"smat.ops.smat.{module}"), name)(*args)

    return call


TORCH = Backend("torch", (), attention.attend, attention.attend_backward, step_token)
TRITON = Backend(
    "triton",
    ("cuda", "xpu"),  # ROCm is "cuda" to torch
    _later("triton.attention", "attend"),
    _later("triton.attention", "attend_backward"),
    _later("triton.decode", "step_token"),
)
NATIVE = Backend(
    "native",
    ("cpu",),
    _later("native.attention", "attend"),
    _later("native.attention", "attend_backward"),
    _later("native.decode", "step_token"),
)
BACKENDS = (TRITON, NATIVE, TORCH)  # the preferred one first


def available_backends(device: torch.device | str = "cpu") -> tuple[str, ...]:
    """List the implementations that run on a device, the preferred one first.

    >>> available_backends("cpu")[-1]
    'torch'
    """
    at = torch.device(device)
    return tuple(each.name for each in BACKENDS if each.runs_on(at) and _is_installed(each.name))


def choose_backend(
    backend: str, device: torch.device, *dtypes: torch.dtype, tokens: int | None = None
) -> Backend:
    """Resolve "auto" to the best implementation for a device; a forced one must run there.

    >>> choose_backend("auto", torch.device("cpu"), tokens=100).name
    'torch'

    A call of a few tokens (times heads) is not worth compiling kernels for, unless SMAT_NATIVE is
    "always": then tests of small calls are tests of the kernels. Triton's sum in fp32:
    fp64 goes to torch. Where Triton interprets (TRITON_INTERPRET=1), its kernels take tensors on a
    CPU if they are asked for by name.
    """
    names = available_backends(device)
    if backend == "auto":
        backend = names[0]
        if backend == "native" and tokens is not None and tokens < _fewest_tokens():
            backend = "torch"
    elif backend == "triton" and not _is_installed("triton"):
        raise missing_extra("triton", "gpu")
    elif backend not in names and not (backend == "triton" and _is_interpreted(device)):
        hint = "; on a CPU Triton needs TRITON_INTERPRET=1" if backend == "triton" else ""
        if backend == "native" and device.type == "cpu":
            hint = f"; {why_not()}"
        raise ValueError(
            f"backend must be 'auto' or one of {', '.join(names)} on {device.type}, "
            f"got {backend!r}{hint}"
        )
    if backend == "triton" and torch.float64 in dtypes:
        backend = "torch"
    return next(each for each in BACKENDS if each.name == backend)


def _fewest_tokens() -> int:
    return 0 if os.environ.get(SWITCH) == "always" else NATIVE_TOKENS


@cache
def _is_installed(name: str) -> bool:
    if name == "native":
        return why_not() is None
    return name == "torch" or find_spec(name) is not None


def _is_interpreted(device: torch.device) -> bool:
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


@cache
def say_once(name: str, device: str, asked: str = "auto") -> None:
    """Log, once a process, which implementation was taken, and where it is not what was asked."""
    instead = f" instead of {asked!r}" if asked not in ("auto", name) else ""
    if name == "torch" and device == "cpu" and (reason := why_not()) is not None:
        instead += f" (no native kernels: {reason})"
    _log.info("attention on %s runs on the %r backend%s", device, name, instead)
