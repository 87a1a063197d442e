"""What a training run tells while it goes on, and the curve that it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CURVE_POINTS = 200


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        step: Steps done.
        steps: Steps in all.
        loss: The training loss, averaged since the last point of the curve; None if unknown.
        accuracy: The last evaluation's, in %; None before the first.
        message: Something that the user should read, such as a damaged checkpoint.
    """

    step: int
    steps: int
    loss: float | None = None
    accuracy: float | None = None
    message: str | None = None


OnProgress = Callable[[Progress], None]


class Interrupted(Exception):
    """A run was asked to stop, and has written its checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped at step {step}, which is kept" if step else "not begun")
        self.step = step


def thin(curve: Sequence[Any], limit: int = CURVE_POINTS) -> list[Any]:
    """Keep at most so many points of a curve, evenly spaced, the first and the last among them.

    >>> thin(range(10), limit=4)
    [0, 3, 6, 9]
    """
    if len(curve) <= limit:
        return list(curve)
    return [curve[round(i * (len(curve) - 1) / (limit - 1))] for i in range(limit)]
