"""What happens when, while decoding: boundaries open as edges and later fold (Algorithm 3)."""

from __future__ import annotations

import sys
import warnings
from bisect import bisect_right
from functools import cache
from typing import NamedTuple

from smat.masks import SMatMask, SMatWarning, none

FOR_EVER = sys.maxsize


class Moment(NamedTuple):
    """Where one token stands: its segment, the newest edge, and whether that edge will be folded.

    Edge i is the boundary of segment i, and it opens when the token at that boundary arrives. The
    keys from edge i up to edge i + 1 are folded into the type table when segment i + 1 begins.
    """

    segment: int
    newest: int
    folds: bool


class Timeline:
    """The events of a mask's schedule, worked out as far as they were asked for.

    >>> from smat.masks import window
    >>> timeline = Timeline(SMatMask(64, vc_dim=2, chunk_size=8, boundary=window(16)))
    >>> timeline.at(31), timeline.at(32)
    (Moment(segment=0, newest=1, folds=True), Moment(segment=1, newest=2, folds=True))
    >>> timeline.next_event(32), timeline.edge(1), timeline.start(1)
    (48, 16, 32)

    Every schedule needs at most two open edges: the boundary of the current segment, and the one
    of the next. Edge i lives in slot ``i % num_slots``. At d = 1 every query sees every earlier
    key whatever n(t) is, so there are no events; unless write weights tell distant keys apart.

    Paper: n(t) = ``edge(at(t - 1).segment)``; R_old and Delta_old belong to the segment's own edge,
    R_cur and Delta_cur to the newest.
    """

    def __init__(self, mask: SMatMask, weighted: bool = False) -> None:
        schedule = none() if mask.vc_dim == 1 and not weighted else mask.schedule
        self.num_slots = 2 if schedule.moves else 1
        self._pieces = schedule.pieces()
        self._starts: list[int] = []
        self._edges: list[int] = []
        self._ended = False
        self._moment = Moment(0, 0, False)
        self._valid = range(0)

    def at(self, position: int) -> Moment:
        """Return the moment of the token at a 0-based position."""
        if position not in self._valid:
            self._grow_past(position)
            segment = bisect_right(self._starts, position) - 1
            newest = bisect_right(self._edges, position) - 1
            self._moment = Moment(segment, newest, self.has(newest + 1))
            until = self.next_event(position)
            self._valid = range(position, FOR_EVER if until is None else until)
        return self._moment

    def has(self, index: int) -> bool:
        """Whether there is a segment with this number."""
        while not self._ended and len(self._starts) <= index:
            self._grow()
        return index < len(self._starts)

    def start(self, index: int) -> int:
        """Return the first query of a segment."""
        assert self.has(index)
        return self._starts[index]

    def edge(self, index: int) -> int:
        """Return the boundary of a segment."""
        assert self.has(index)
        return self._edges[index]

    def next_event(self, position: int) -> int | None:
        """Find the first later position at which an edge opens or a segment begins."""
        self._grow_past(position)
        later = [
            values[place]
            for values in (self._starts, self._edges)
            if (place := bisect_right(values, position)) < len(values)
        ]
        return min(later, default=None)

    def _grow_past(self, position: int) -> None:
        while not self._ended and (not self._edges or self._edges[-1] <= position):
            self._grow()

    def _grow(self) -> None:
        piece = next(self._pieces, None)
        if piece is None:
            self._ended = True
            return
        self._starts.append(piece[0])
        self._edges.append(piece[1])
        number = len(self._edges) - 1
        # The slot of an edge is taken over by a later one, which must not open before the fold.
        folded = number - self.num_slots + 1
        if number and self._edges[number] < self._starts[folded]:
            raise ValueError(
                f"a schedule may have {self.num_slots} open boundaries at a time, but boundary "
                f"{self._edges[number]} opens before the segment that starts at "
                f"{self._starts[folded]}"
            )


def warn_past_horizon(mask: SMatMask, num_tokens: int) -> None:
    """Say, once for a mask, that its boundary now stays where the horizon put it."""
    if num_tokens > mask.seq_len and not mask.boundary.horizon_free and mask.vc_dim > 1:
        _warn_kept(mask)


@cache
def _warn_kept(mask: SMatMask) -> None:
    warnings.warn(
        f"decoding past T = {mask.seq_len}: the boundary is kept at n = {mask.num_distant}, and "
        "every later key is recent. A stepped window, boundary=window(step), has no horizon.",
        SMatWarning,
        stacklevel=6,  # past the layers between this function and the caller of the step
    )
