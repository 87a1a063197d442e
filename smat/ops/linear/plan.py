"""How kernels of the causal branch cut a sequence: chunks, windows, blocks (equation 8).

A window is visited chunk by chunk, from where it begins to the end of its segment; only the last of
these chunks, the segment's own, have queries that look through it. Where windows overlap, a chunk
is visited by several, each of which has a state of its own there.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from smat.masks import Segment
from smat.ops.linear.chunks import cut_chunks

CHUNK = 64  # tokens of a tile in half precision


def chunk_of(dtype: torch.dtype) -> int:
    """Choose how many tokens a tile has; fp32 is multiplied in parts, which take more registers.

    >>> chunk_of(torch.bfloat16), chunk_of(torch.float32)
    (64, 32)
    """
    return CHUNK if dtype.itemsize == 2 else CHUNK // 2


class Plan(NamedTuple):
    """Chunks and windows as tables on a device."""

    chunks: Tensor  # (C, 4): first token, end, the first and the last window that visit it
    windows: (
        Tensor  # (W, 4): first chunk, first own chunk, end, and its visits' number less chunk's
    )
    num_visits: int


@lru_cache(maxsize=64)
def make_plan(segments: tuple[Segment, ...], chunk: int, device: torch.device) -> Plan:
    """Cut a sequence, at every segment and where every window begins.

    >>> segments = (Segment(0, 3, 0), Segment(3, 5, 1))
    >>> plan = make_plan(segments, 2, torch.device("cpu"))
    >>> plan.chunks.tolist()
    [[0, 1, 0, 0], [1, 3, 0, 1], [3, 5, 1, 1]]
    >>> plan.windows.tolist(), plan.num_visits
    ([[0, 0, 2, 0], [1, 2, 3, 1]], 4)
    """
    cuts = [
        (at, min(at + chunk, piece.stop), piece.boundary)
        for piece in cut_chunks(segments)
        for at in range(piece.start, piece.stop, chunk)
    ]
    at_start = {start: number for number, (start, _, _) in enumerate(cuts)}
    at_start[cuts[-1][1]] = len(cuts)
    windows, num_visits = [], 0
    for start, stop, boundary in segments:
        first, own, end = (at_start[edge] for edge in (boundary, start, stop))
        windows.append((first, own, end, num_visits - first))
        num_visits += end - first
    chunks, own_window, last_window = [], 0, 0
    for number, (start, stop, _) in enumerate(cuts):
        while windows[own_window][2] <= number:
            own_window += 1
        while last_window + 1 < len(windows) and windows[last_window + 1][0] <= number:
            last_window += 1
        chunks.append((start, stop, own_window, last_window))
    with torch.inference_mode(False):
        return Plan(
            torch.tensor(chunks, device=device), torch.tensor(windows, device=device), num_visits
        )
