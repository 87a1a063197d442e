"""Memory that the long-range branch uses again and again instead of asking for fresh pages.

On a CPU the first touch of a page costs more than the arithmetic on it, and malloc gives large
blocks back as soon as they are freed. So tables and grids live in buffers that each thread keeps,
up to ``KEPT_BYTES`` a buffer; what does not fit is allocated as usual. A buffer is scratch: whoever
takes one under a name overwrites it, and nothing that leaves the op may lie in one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

KEPT_BYTES = 32 << 20


class _Kept(threading.local):
    """One thread's buffers, by name and dtype."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, torch.dtype], Tensor] = {}


_kept = _Kept()


def scratch(name: str, shape: Sequence[int], like: Tensor) -> Tensor:
    """Return uninitialised memory that is valid until the same name is asked for again.

    >>> first = scratch("example", (2, 3), torch.zeros(1))
    >>> first.shape, scratch("example", (6,), torch.zeros(1)).data_ptr() == first.data_ptr()
    (torch.Size([2, 3]), True)
    """
    size = math.prod(shape)
    if like.device.type != "cpu" or size * like.element_size() > KEPT_BYTES:
        return like.new_empty(shape)
    buffer = _kept.buffers.get((name, like.dtype))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=like.dtype)
        _kept.buffers[name, like.dtype] = buffer
    return buffer[:size].view(*shape)


def release_scratch() -> int:
    """Free this thread's buffers and return how many bytes they were.

    >>> _ = release_scratch()
    >>> release_scratch()
    0
    """
    size = sum(buffer.numel() * buffer.element_size() for buffer in _kept.buffers.values())
    _kept.buffers.clear()
    return size
