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
from functools import cache

import torch
from torch import Tensor

KEPT_BYTES = 32 << 20
LARGEST_HEAP_BLOCK = 31 << 20  # just under the size at which malloc stops to adapt


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


@cache
def keep_freed_pages() -> None:
    """Let malloc keep the pages of temporaries that were freed, once a process.

    glibc serves a block from its heap, and keeps it there when it is freed, if a block of that size
    was freed before; until then every temporary of a few megabytes comes from the system, page by
    page, and goes back. Freeing one untouched block teaches it. At most twice its size stays with
    the process. Allocators that do not learn this way take no notice.
    """
    torch.empty(LARGEST_HEAP_BLOCK, dtype=torch.uint8)


def release_scratch() -> int:
    """Free this thread's buffers and return how many bytes they were.

    >>> _ = release_scratch()
    >>> release_scratch()
    0
    """
    size = sum(buffer.numel() * buffer.element_size() for buffer in _kept.buffers.values())
    _kept.buffers.clear()
    return size
