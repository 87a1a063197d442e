"""Write curves for TensorBoard, in the thread that trains: a full disk is an error, not a hang."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from smat.extras import require
from smat.training.files import disk_full, is_disk_full


class EventLog:
    """A TensorBoard event file in a folder; values of a resumed run replace those after its step.

    torch's SummaryWriter writes from a thread of its own, where an error becomes a traceback.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        self._events = require("tensorboard.compat.proto.event_pb2", extra="train")
        self._summaries = require("tensorboard.compat.proto.summary_pb2", extra="train")
        records = require("tensorboard.summary.writer.record_writer", extra="train")
        self._path = folder / f"events.out.tfevents.{time.time_ns() // 1000}.smat"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("wb")
        self._records = records.RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._write(session_log=start, step=start_step)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Append the values of a step."""
        value = self._summaries.Summary.Value
        rows = [value(tag=tag, simple_value=number) for tag, number in values.items()]
        self._write(summary=self._summaries.Summary(value=rows), step=step)

    def close(self) -> None:
        """Write what is buffered and close the file."""
        try:
            self._file.close()
        except OSError as error:
            self._refuse(error)

    def _write(self, **fields: Any) -> None:
        try:
            event = self._events.Event(wall_time=time.time(), **fields)
            self._records.write(event.SerializeToString())
            self._records.flush()
        except OSError as error:
            self._refuse(error)

    def _refuse(self, error: OSError) -> None:
        if is_disk_full(error):
            raise disk_full(self._path, 1) from error
        raise error
