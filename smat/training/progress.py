"""What a run tells while it goes on: where it is, why it ends, its curve, and a TensorBoard log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from smat.extras import require
from smat.training.checkpoint import explain_full_disk

CURVE_POINTS = 200
Point = TypeVar("Point")
Log = Callable[[int, Mapping[str, float]], None]


class NonFiniteLossError(ArithmeticError):
    """The loss became infinite or not a number."""


class Interrupted(Exception):
    """A run was asked to stop, and has written its checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped at step {step}, which is kept" if step else "not begun")
        self.step = step


@dataclass(frozen=True)
class Progress:
    """Where a run is: how many of its steps are done, and how well it does."""

    step: int
    steps: int
    loss: float | None = None  # of training, averaged since the last point of the curve
    accuracy: float | None = None  # the last evaluation's, in %
    message: str | None = None  # what the user should read, such as of a damaged checkpoint


OnProgress = Callable[[Progress], None]


def thin(curve: Sequence[Point], limit: int = CURVE_POINTS) -> list[Point]:
    """Keep at most so many points of a curve, evenly spaced, the first and the last among them.

    >>> thin(range(10), limit=4)
    [0, 3, 6, 9]
    """
    if len(curve) <= limit:
        return list(curve)
    return [curve[round(i * (len(curve) - 1) / (limit - 1))] for i in range(limit)]


@contextmanager
def event_log(folder: Path, start_step: int) -> Iterator[Log]:
    """Open a TensorBoard log; values of a resumed run replace those after its step.

    torch's SummaryWriter writes from a thread of its own, where a full disk becomes a hang or a
    traceback; this one writes in the thread that trains, where it is an error.
    """
    events = require("tensorboard.compat.proto.event_pb2", extra="train")
    summaries = require("tensorboard.compat.proto.summary_pb2", extra="train")
    records = require("tensorboard.summary.writer.record_writer", extra="train")
    path = folder / f"events.out.tfevents.{time.time_ns() // 1000}.smat"
    folder.mkdir(parents=True, exist_ok=True)
    with explain_full_disk(path), path.open("wb") as file:
        writer = records.RecordWriter(file)

        def write(**fields: Any) -> None:
            writer.write(events.Event(wall_time=time.time(), **fields).SerializeToString())
            writer.flush()

        def add(step: int, values: Mapping[str, float]) -> None:
            entry = summaries.Summary.Value
            entries = [entry(tag=tag, simple_value=number) for tag, number in values.items()]
            write(summary=summaries.Summary(value=entries), step=step)

        write(file_version="brain.Event:2")
        write(session_log=events.SessionLog(status=events.SessionLog.START), step=start_step)
        yield add
