"""Place the line between distant and recent keys: schedules n(t) (stepped window and appendix).

A schedule says how many leading keys are distant for each query: constant over segments of queries,
never decreasing, and known in closed form at every position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn

from smat.geometry.field import check_integer


class Segment(NamedTuple):
    """Queries `start <= t < stop` (0-based) that share one boundary: distant is `j < boundary`."""

    start: int
    stop: int
    boundary: int


@dataclass(frozen=True)
class BoundarySchedule(ABC):
    """The recipe of n(t); `resolve` turns it into the schedule of a horizon.

    >>> window(step=4).segments(12)
    (Segment(start=0, stop=8, boundary=0), Segment(start=8, stop=12, boundary=4))
    >>> window(step=4).boundary_at(13), window(step=4).segment_index(13)
    (8, 2)

    Segments are numbered from 0. `moves`: a query can find another boundary than an earlier recent
    query did. `horizon_free`: n(t) depends on t alone, so that decoding may run past the horizon.

    Paper: n(t) = `boundary_at(t - 1)`; T_max = the horizon of the mask; c_dc = a window's `step`.
    """

    kind: ClassVar[str]
    moves: ClassVar[bool]
    horizon_free: ClassVar[bool] = True
    offset: ClassVar[int] = 0  # tokens before the first one, from where profiles are counted

    @property
    def num_segments(self) -> int | None:
        """The number of segments, None if they never end."""
        return None

    @abstractmethod
    def segment_index(self, position: int, /) -> int:
        """Return the number of the segment that holds the query at a 0-based position."""

    @abstractmethod
    def segment_start(self, index: int, /) -> int:
        """Return the position of a segment's first query."""

    @abstractmethod
    def segment_boundary(self, index: int, /) -> int:
        """Return n(t) of a segment's queries."""

    @abstractmethod
    def edge_index(self, position: int, /) -> int:
        """Return the last segment whose boundary is at or before a position, begun or not."""

    @property
    def anchor(self) -> int:
        """The position from which recent queries are counted: the boundary if it never moves."""
        return 0

    def boundary_at(self, position: int) -> int:
        """Return the number of distant keys of the query at a 0-based position."""
        return self.segment_boundary(self.segment_index(position))

    def describe(self) -> str:
        """Return the schedule as one would write it in a call."""
        return f"{self.kind}()"

    def resolve(self, seq_len: int, chunk_size: int) -> BoundarySchedule:
        """Return the schedule for a horizon; itself unless it is a function of the horizon."""
        return self

    def segments(self, seq_len: int, start: int = 0) -> tuple[Segment, ...]:
        """Cut `[start, seq_len)` where the boundary changes."""
        last = self.segment_index(check_integer("seq_len", seq_len, least=start + 1) - 1)
        indices = range(self.segment_index(start), last + 1)
        starts = [start, *(self.segment_start(index) for index in indices[1:])]
        boundaries = [self.segment_boundary(index) for index in indices]
        return tuple(map(Segment, starts, [*starts[1:], seq_len], boundaries))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `schedule_from_dict` turns back into this schedule."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class KeptBoundary(BoundarySchedule):
    """The first `num_distant` keys are distant, for ever: n(t) = n for t > n, before that 0.

    >>> [kept(2).boundary_at(position) for position in range(5)]
    [0, 0, 2, 2, 2]
    """

    num_distant: int
    kind: ClassVar[str] = "kept"
    moves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        count = check_integer("num_distant", self.num_distant, least=0)
        object.__setattr__(self, "num_distant", count)

    @property
    def num_segments(self) -> int:
        return 2 if self.num_distant else 1

    @property
    def anchor(self) -> int:
        return self.num_distant

    def segment_index(self, position: int) -> int:
        return int(0 < self.num_distant <= position)

    def segment_start(self, index: int) -> int:
        return index * self.num_distant

    segment_boundary = segment_start
    edge_index = segment_index

    def describe(self) -> str:
        return f"kept({self.num_distant})" if self.num_distant else "none()"


@dataclass(frozen=True)
class RebuiltBoundary(BoundarySchedule):
    """Half of the horizon is distant, rounded down to whole chunks: n = c floor(T / 2c).

    >>> rebuilt().resolve(seq_len=1000, chunk_size=64)
    KeptBoundary(num_distant=448)
    """

    kind: ClassVar[str] = "rebuilt"
    moves: ClassVar[bool] = False
    horizon_free: ClassVar[bool] = False

    def resolve(self, seq_len: int, chunk_size: int) -> BoundarySchedule:
        return KeptBoundary(chunk_size * (seq_len // (2 * chunk_size)))

    def segment_index(self, position: int = 0, /) -> NoReturn:
        raise ValueError("rebuilt() depends on the horizon: call its resolve(seq_len, chunk_size)")

    segment_start = segment_boundary = edge_index = segment_index
    num_segments = property(segment_index)


@dataclass(frozen=True)
class DoublingBoundary(BoundarySchedule):
    """The boundary doubles at each power of two: n(t) = 2^(floor(log2 t) - 1), and n(1) = 0.

    >>> [doubling().boundary_at(position) for position in range(9)]
    [0, 1, 1, 2, 2, 2, 2, 4, 4]
    """

    kind: ClassVar[str] = "doubling"
    moves: ClassVar[bool] = True

    def segment_index(self, position: int) -> int:
        return (position + 1).bit_length() - 1  # floor(log2 t)

    def segment_start(self, index: int) -> int:
        return (1 << index) - 1

    def segment_boundary(self, index: int) -> int:
        return (1 << index) >> 1

    def edge_index(self, position: int) -> int:
        return position.bit_length()


@dataclass(frozen=True)
class WindowBoundary(BoundarySchedule):
    """The recent window advances in steps: n(t) = max(0, (floor((t - 1) / step) - 1) step).

    >>> [window(step=2).boundary_at(position) for position in range(8)]
    [0, 0, 0, 0, 2, 2, 4, 4]

    A query sees between `step` and `2 step` recent keys, however long the sequence is.
    """

    step: int
    kind: ClassVar[str] = "window"
    moves: ClassVar[bool] = True

    def __post_init__(self) -> None:
        step = check_integer("the step of a window", self.step, least=1)
        object.__setattr__(self, "step", step)

    def segment_index(self, position: int) -> int:
        return max(0, position // self.step - 1)

    def segment_start(self, index: int) -> int:
        return (index + 1) * self.step if index else 0

    def segment_boundary(self, index: int) -> int:
        return index * self.step

    def edge_index(self, position: int) -> int:
        return position // self.step

    def describe(self) -> str:
        return f"window(step={self.step})"


@dataclass(frozen=True)
class ShiftedBoundary(BoundarySchedule):
    """What the tokens from `begin` on see of each other: n(t + begin) - begin, at least 0.

    >>> ShiftedBoundary(window(step=4), begin=6).segments(8)
    (Segment(start=0, stop=6, boundary=0), Segment(start=6, stop=8, boundary=2))

    Of a sequence whose earlier tokens are held elsewhere, on other ranks.
    """

    base: BoundarySchedule
    begin: int
    kind: ClassVar[str] = "shifted"

    @property
    def moves(self) -> bool:  # type: ignore[override]
        return self.base.moves

    @property
    def offset(self) -> int:  # type: ignore[override]
        return self.begin

    @property
    def _first(self) -> int:
        """The last segment of the base whose boundary is not behind the beginning."""
        return self.base.edge_index(self.begin)

    @property
    def num_segments(self) -> int | None:
        every = self.base.num_segments
        return None if every is None else every - self._first

    @property
    def anchor(self) -> int:
        return self.base.anchor - self.begin

    def segment_index(self, position: int) -> int:
        return max(0, self.base.segment_index(position + self.begin) - self._first)

    def segment_start(self, index: int) -> int:
        return self.base.segment_start(self._first + index) - self.begin if index else 0

    def segment_boundary(self, index: int) -> int:
        return self.base.segment_boundary(self._first + index) - self.begin if index else 0

    def edge_index(self, position: int) -> int:
        return self.base.edge_index(position + self.begin) - self._first

    def describe(self) -> str:
        return f"{self.base.describe()} from {self.begin}"

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "base": self.base.to_dict(), "begin": self.begin}


def none() -> KeptBoundary:
    """No key is ever distant: the plain causal mask, whatever d is."""
    return KeptBoundary(0)


# The others are called by their plain names: kept(512), rebuilt(), doubling(), window(256).
kept, rebuilt, doubling, window = KeptBoundary, RebuiltBoundary, DoublingBoundary, WindowBoundary


def schedule_from_dict(data: Mapping[str, Any]) -> BoundarySchedule:
    """Rebuild a schedule from `schedule.to_dict()`.

    >>> schedule_from_dict({"kind": "window", "step": 256})
    WindowBoundary(step=256)
    """
    classes = (kept, rebuilt, doubling, window, ShiftedBoundary)
    kinds: dict[str, type[BoundarySchedule]] = {each.kind: each for each in classes}
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in kinds:
        raise ValueError(f"unknown boundary schedule {kind!r}; known are {sorted(kinds)}")
    if "base" in fields:
        fields["base"] = schedule_from_dict(fields["base"])
    try:
        return kinds[kind](**fields)
    except TypeError:
        raise ValueError(f"schedule {kind!r} cannot be built from the fields {fields}") from None
