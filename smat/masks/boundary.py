"""Place the line between distant and recent keys: schedules n(t) (stepped window and appendix).

A schedule says how many leading keys are distant for each query. It is piecewise constant in the
query position and never decreases, so a sequence falls into a few segments with one boundary each,
and one algorithm serves every schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any, ClassVar, NamedTuple

from smat.geometry import default_num_distant


class Segment(NamedTuple):
    """Queries `start <= t < stop` (0-based) that share one boundary: distant is `j < boundary`."""

    start: int
    stop: int
    boundary: int


@dataclass(frozen=True)
class BoundarySchedule(ABC):
    """The recipe of n(t); `resolve` turns it into the schedule of a horizon.

    >>> window(step=4).segments(14)
    (Segment(start=0, stop=8, boundary=0), Segment(start=8, stop=12, boundary=4), \
Segment(start=12, stop=14, boundary=8))
    >>> window(step=4).boundary_at(13)
    8

    `moves` tells whether a query can find another boundary than an earlier recent query did;
    `horizon_free` whether n(t) depends on t alone, so that decoding may run past the horizon.

    Paper: n(t) = `boundary_at(t - 1)`; T_max = the horizon of the mask; c_dc = `window_step`.
    """

    kind: ClassVar[str]
    moves: ClassVar[bool]
    horizon_free: ClassVar[bool] = True

    @abstractmethod
    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield `(first query, boundary)` for each value of n(t), in order, starting at query 0."""

    def boundary_at(self, position: int) -> int:
        """Return the number of distant keys of the query at a 0-based position."""
        return self.segments(position + 1)[-1].boundary

    @property
    def anchor(self) -> int:
        """The position from which recent queries are counted: the boundary if it never moves."""
        return 0

    def describe(self) -> str:
        """Return the schedule as one would write it in a call."""
        return f"{self.kind}()"

    def resolve(self, seq_len: int, chunk_size: int) -> BoundarySchedule:
        """Return the schedule for a horizon; itself unless it is a function of the horizon."""
        return self

    def segments(self, seq_len: int) -> tuple[Segment, ...]:
        """Cut `[0, seq_len)` where the boundary changes.

        >>> kept(3).segments(5)
        (Segment(start=0, stop=3, boundary=0), Segment(start=3, stop=5, boundary=3))
        """
        if seq_len < 1:
            raise ValueError(f"a sequence has at least one token, but seq_len = {seq_len}")
        segments: list[Segment] = []
        pieces = self.pieces()
        start, boundary = next(pieces)
        for next_start, next_boundary in pieces:
            if next_start >= seq_len:
                break
            segments.append(Segment(start, next_start, boundary))
            start, boundary = next_start, next_boundary
        return (*segments, Segment(start, seq_len, boundary))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `schedule_from_dict` turns back into this schedule."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class KeptBoundary(BoundarySchedule):
    """The first `num_distant` keys are distant, for ever: n(t) = n for t > n, before that 0.

    >>> [kept(2).boundary_at(position) for position in range(5)]
    [0, 0, 2, 2, 2]

    The first n queries form the block L_n: they see their own prefix only.
    """

    num_distant: int
    kind: ClassVar[str] = "kept"
    moves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_distant < 0:
            raise ValueError(f"num_distant must be 0 or more, but it is {self.num_distant}")

    @property
    def anchor(self) -> int:
        return self.num_distant

    def pieces(self) -> Iterator[tuple[int, int]]:
        yield 0, 0
        if self.num_distant > 0:
            yield self.num_distant, self.num_distant

    def boundary_at(self, position: int) -> int:
        return self.num_distant if position >= self.num_distant else 0

    def describe(self) -> str:
        return f"kept({self.num_distant})" if self.num_distant else "none()"


@dataclass(frozen=True)
class RebuiltBoundary(BoundarySchedule):
    """Half of the horizon is distant, rounded down to whole chunks: n = c floor(T / 2c).

    >>> rebuilt().resolve(seq_len=1000, chunk_size=64)
    KeptBoundary(num_distant=448)

    It must know T, so a mask resolves it; by itself it has no segments.
    """

    kind: ClassVar[str] = "rebuilt"
    moves: ClassVar[bool] = False
    horizon_free: ClassVar[bool] = False

    def resolve(self, seq_len: int, chunk_size: int) -> BoundarySchedule:
        return KeptBoundary(default_num_distant(seq_len, chunk_size))

    def pieces(self) -> Iterator[tuple[int, int]]:
        raise ValueError(
            "rebuilt() depends on the horizon: ask a mask for its segments, "
            "or call rebuilt().resolve(seq_len, chunk_size) first"
        )


@dataclass(frozen=True)
class DoublingBoundary(BoundarySchedule):
    """The boundary doubles at each power of two: n(t) = 2^(floor(log2 t) - 1), and n(1) = 0.

    >>> [doubling().boundary_at(position) for position in range(9)]
    [0, 1, 1, 2, 2, 2, 2, 4, 4]
    """

    kind: ClassVar[str] = "doubling"
    moves: ClassVar[bool] = True

    def pieces(self) -> Iterator[tuple[int, int]]:
        yield 0, 0
        for exponent in count(1):
            yield 2**exponent - 1, 2 ** (exponent - 1)

    def boundary_at(self, position: int) -> int:
        # The paper's t is position + 1, and its floor(log2 t) is one less than t's bit length.
        return (1 << (position + 1).bit_length()) // 4


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
        if self.step < 1:
            raise ValueError(f"the step of a window must be 1 or more, but it is {self.step}")

    def pieces(self) -> Iterator[tuple[int, int]]:
        yield 0, 0
        for block in count(2):
            yield block * self.step, (block - 1) * self.step

    def boundary_at(self, position: int) -> int:
        return max(0, position // self.step - 1) * self.step

    def describe(self) -> str:
        return f"window(step={self.step})"


def none() -> KeptBoundary:
    """No key is ever distant: the plain causal mask, whatever d is."""
    return KeptBoundary(0)


def kept(num_distant: int) -> KeptBoundary:
    """The boundary stays where it was put."""
    return KeptBoundary(num_distant)


def rebuilt() -> RebuiltBoundary:
    """The boundary is half of whatever length the mask is built for (the default)."""
    return RebuiltBoundary()


def doubling() -> DoublingBoundary:
    """The boundary doubles at each power of two."""
    return DoublingBoundary()


def window(step: int) -> WindowBoundary:
    """The recent window advances by `step` keys at a time; any step of 1 or more will do."""
    return WindowBoundary(step)


_CLASSES = (KeptBoundary, RebuiltBoundary, DoublingBoundary, WindowBoundary)
_KINDS: dict[str, type[BoundarySchedule]] = {schedule.kind: schedule for schedule in _CLASSES}


def schedule_from_dict(data: Mapping[str, Any]) -> BoundarySchedule:
    """Rebuild a schedule from `schedule.to_dict()`.

    >>> schedule_from_dict({"kind": "window", "step": 256})
    WindowBoundary(step=256)
    """
    fields = dict(data)
    kind = fields.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"unknown boundary schedule {kind!r}; known are {sorted(_KINDS)}")
    try:
        return _KINDS[kind](**fields)
    except TypeError:
        raise ValueError(f"schedule {kind!r} cannot be built from the fields {fields}") from None
