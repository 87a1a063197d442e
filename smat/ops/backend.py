"""One place picks the implementation: of the two branches, forward and backward.

A backend is four functions with the signatures of `causal`, `long_range` and their backward passes.
"torch" is complete and runs everywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from smat.ops.linear.causal import CausalGrads, causal, causal_backward
from smat.ops.smat.long_range import LongRangeGrads, long_range, long_range_backward

_log = logging.getLogger("smat")


class Backend(NamedTuple):
    """The two branches, as one implementation has them."""

    name: str
    devices: tuple[str, ...]  # none: every device
    causal: Callable[..., Tensor]
    causal_backward: Callable[..., Iterator[CausalGrads]]
    long_range: Callable[..., tuple[int, Tensor]]
    long_range_backward: Callable[..., LongRangeGrads]

    def runs_on(self, device: torch.device) -> bool:
        """Whether it takes tensors on a device."""
        return not self.devices or device.type in self.devices


TORCH = Backend("torch", (), causal, causal_backward, long_range, long_range_backward)
BACKENDS = (TORCH,)  # the preferred one first


def available_backends(device: torch.device | str = "cpu") -> tuple[str, ...]:
    """List the implementations that run on a device, the preferred one first.

    >>> available_backends("cpu")
    ('torch',)
    """
    return tuple(each.name for each in BACKENDS if each.runs_on(torch.device(device)))


def choose_backend(backend: str, device: torch.device) -> Backend:
    """Resolve "auto" to the best implementation for a device; a forced one must run there.

    >>> choose_backend("auto", torch.device("cpu")).name
    'torch'
    """
    fitting = [each for each in BACKENDS if each.runs_on(device)]
    chosen = next((each for each in fitting if backend in ("auto", each.name)), None)
    if chosen is None:
        names = ", ".join(each.name for each in fitting)
        raise ValueError(
            f"backend must be 'auto' or one of {names} on {device.type}, got {backend!r}"
        )
    return chosen


@cache
def say_once(name: str, device: str) -> None:
    """Log, once a process, which implementation was taken."""
    _log.info("attention on %s runs on the %r backend", device, name)
