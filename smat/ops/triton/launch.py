"""Launch kernels over a flat grid, in parts where it is long, and note what was launched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_BLOCKS = 65_520  # of a launch: under 65,536 on every device, and a multiple of 16


class Launch(NamedTuple):
    """A kernel that was launched: its blocks, its arguments by name, its compile-time settings.

    Of tensors the shape, the strides and the dtype are kept, not the memory.
    """

    kernel: Any
    num_blocks: int
    arguments: dict[str, Any]
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel's name."""
        return str(self.kernel.fn.__name__)


class Recorder(NamedTuple):
    """Where launches are noted, and whether they are run."""

    launches: list[Launch]
    run: bool


_recorder: ContextVar[Recorder | None] = ContextVar("launches", default=None)


@contextmanager
def record_launches(run: bool = True) -> Iterator[list[Launch]]:
    """Note all launches; without `run` nothing is computed, and tensors may be on "meta".

    >>> with record_launches() as launches:
    ...     pass
    >>> launches
    []
    """
    recorder = Recorder([], run)
    token = _recorder.set(recorder)
    try:
        yield recorder.launches
    finally:
        _recorder.reset(token)


def launch(kernel: Any, num_blocks: int, *args: Any, **meta: Any) -> None:
    """Run a kernel over a flat grid.

    Its first argument is the number of the launch's first block, so that its own number is
    ``first_block + tl.program_id(0)``; ``args`` are the others, ``meta`` its constants.
    """
    recorder = _recorder.get()
    if recorder is not None:
        named = dict(zip(kernel.arg_names[1:], map(_describe, args), strict=False))
        recorder.launches.append(Launch(kernel, num_blocks, named, meta))
        if not recorder.run:
            return
    with _on_device_of(args):
        for first in range(0, num_blocks, MOST_BLOCKS):
            kernel[(min(MOST_BLOCKS, num_blocks - first),)](first, *args, **meta)


def _on_device_of(args: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Make the tensors' device the current one, which is where Triton launches."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    if device.type == "cpu":
        return nullcontext()
    return torch.get_device_module(device).device(device)


def _describe(x: Any) -> Any:
    return x.detach().to("meta") if isinstance(x, Tensor) else x


def dot_precision(x: Tensor) -> str:
    """Choose how products of fp32 tiles are made, for inputs like a tensor."""
    return precision_on("hip" if torch.version.hip else x.device.type, x.dtype)


def precision_on(backend: str, dtype: torch.dtype) -> str:
    """Choose how products of fp32 tiles are made on a kind of device, for inputs of a dtype.

    >>> precision_on("cuda", torch.float32), precision_on("hip", torch.float32)
    ('tf32x3', 'ieee')

    Half precision has at most 11 bits, which TF32 holds; fp32 is multiplied in three TF32 parts
    where there are such units, else as it is.
    """
    if backend != "cuda":
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"
