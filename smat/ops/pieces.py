"""The order in which a masked sequence is worked off: pieces, blocks of chunks, open windows.

A query's recent window begins at its boundary n(t). Cutting the sequence wherever the boundary
changes, and wherever a boundary lies, leaves pieces in which every window is a whole number of
pieces plus a part of the current one. A piece is worked off in blocks of chunks of ``TILE`` tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from smat.masks import Segment

TILE = 64  # tokens of a chunk: 64 x 64 tiles reach most of the GEMM rate at the fewest operations


class Block(NamedTuple):
    """Tokens ``start <= t < stop`` of one piece, worked off by one set of batched products."""

    start: int
    stop: int
    boundary: int
    begins_segment: bool
    ends_segment: bool
    opens_window: bool  # a later segment's window begins here
    tile: int

    @property
    def num_chunks(self) -> int:
        """The number of chunks, the last of which may be short."""
        return -(-(self.stop - self.start) // self.tile)

    @property
    def padded(self) -> int:
        """The number of tokens with the last chunk filled up."""
        return self.num_chunks * self.tile


def cut_blocks(segments: Sequence[Segment], chunks_per_block: int) -> list[Block]:
    """Cut a sequence into blocks, in chronological order.

    >>> [block[:3] for block in cut_blocks([Segment(0, 100, 0), Segment(100, 130, 100)], 1)]
    [(0, 64, 0), (64, 100, 0), (100, 130, 100)]
    """
    windows = {segment.boundary for segment in segments if segment.boundary < segment.start}
    length = segments[-1].stop
    blocks = []
    for segment in segments:
        edges = {edge for edge in windows if segment.start < edge < segment.stop}
        cuts = sorted({segment.start, segment.stop, *edges})
        for start, stop in itertools.pairwise(cuts):
            tile = min(TILE, stop - start)
            width = tile * chunks_per_block
            blocks += [
                Block(
                    at,
                    min(at + width, stop),
                    segment.boundary,
                    at == segment.start,
                    min(at + width, stop) == segment.stop,
                    at in windows,
                    tile,
                )
                for at in range(start, stop, width)
            ]
    assert blocks[0].start == 0
    assert blocks[-1].stop == length
    return blocks
