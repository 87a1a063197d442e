"""How keys that other ranks hold are grouped for the queries of this one: integers only.

At a position some edges are open: those of the segments whose queries are still to come. The keys
before it fall into groups, each up to the next edge; all keys before the first open edge are
`OLDER`. A window is a sum of groups from its edge on, what is distant for a segment a sum of groups
before its edge: so a group is worked off once, and no group is taken apart again by later queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from smat.masks import BoundarySchedule

OLDER = -1  # the keys before the first open edge


class CarriedGroups(NamedTuple):
    """The groups that queries from a position on need: as one state each, and by profile.

    >>> from smat.masks import window
    >>> CarriedGroups.at(window(step=4), 10, 40, "both")
    CarriedGroups(windows=(1, 2), tables=(-1, 1, 2))
    """

    windows: tuple[int, ...] = ()
    tables: tuple[int, ...] = ()

    @classmethod
    def at(
        cls,
        schedule: BoundarySchedule,
        position: int,
        length: int,
        branch: str,
        goes_on: bool = False,
    ) -> CarriedGroups:
        """Group the keys before a position of a sequence; decoding may go on behind its length."""
        if position == 0:
            return cls()
        first, newest = schedule.segment_index(position), schedule.edge_index(position)
        edges = tuple(
            each for each in range(first, newest + 1) if schedule.segment_boundary(each) < position
        )  # behind one that opens here no key stands yet
        later = tuple(each for each in edges if _is_distant_later(schedule, each, length, goes_on))
        older = (OLDER,) if schedule.segment_boundary(first) > 0 else ()
        return cls(
            () if branch == "long_range" else edges, () if branch == "causal" else older + later
        )


def _is_distant_later(schedule: BoundarySchedule, edge: int, length: int, goes_on: bool) -> bool:
    """Whether the keys behind an edge are distant for some query."""
    num_segments = schedule.num_segments
    exists = num_segments is None or edge + 1 < num_segments
    return exists and (goes_on or schedule.segment_start(edge + 1) < length)


def keys_of(schedule: BoundarySchedule, group: int, begin: int, end: int) -> slice:
    """Cut out the keys begin .. end that belong to a group at position `end`, from `begin` on."""
    start = 0 if group == OLDER else schedule.segment_boundary(group)
    after = schedule.segment_index(end) if group == OLDER else group + 1
    num_segments = schedule.num_segments
    stop = end if after == num_segments else min(end, schedule.segment_boundary(after))
    start = max(start, begin)
    return slice(start - begin, max(start, stop) - begin)


def merge_groups(before: Sequence[int], behind: Sequence[int], first: int) -> list[tuple[int, int]]:
    """Say which groups at one position become which at a later one, whose first edge is given.

    >>> merge_groups((-1, 1, 2), (-1, 2, 3), first=2)
    [(0, 0), (0, 1), (1, 2)]
    """
    later = [group if group >= first else OLDER for group in before]
    pairs = enumerate(later)
    return [(behind.index(group), number) for number, group in pairs if group in behind]


class Reader(NamedTuple):
    """Queries start .. stop of a piece that see the same groups: through a window, by type."""

    queries: slice
    windows: tuple[int, ...]
    tables: tuple[int, ...]


def readers(
    schedule: BoundarySchedule, groups: CarriedGroups, begin: int, end: int
) -> Iterator[Reader]:
    """Cut the queries begin .. end into those that see the same of the groups at `begin`.

    >>> from smat.masks import window
    >>> groups = CarriedGroups.at(window(step=4), 10, 40, "both")
    >>> [each.queries for each in readers(window(step=4), groups, 10, 40)]
    [slice(0, 2, None), slice(2, 6, None), slice(6, 30, None)]
    """
    newest = schedule.edge_index(begin)
    start = begin
    while start < end:
        segment, stop = schedule.segment_index(start), end
        if segment <= newest and segment + 1 != schedule.num_segments:
            stop = min(end, schedule.segment_start(segment + 1))
        yield Reader(
            slice(start - begin, stop - begin),
            tuple(each for each in groups.windows if each >= segment),
            tuple(each for each in groups.tables if each < segment),
        )
        start = stop
