"""Make the runs of a table that have no record yet, wherever an engine makes them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Protocol

from smat.experiments.engines import Engine
from smat.experiments.execute import Outcome
from smat.experiments.records import Store
from smat.experiments.run import Run
from smat.training import Progress
from smat.training.checkpoint import remove_checkpoints


class Listener(Protocol):
    """Is told what happens."""

    def progressed(self, run: Run, progress: Progress) -> None:
        """A run has come further."""

    def ended(self, outcome: Outcome) -> None:
        """A run has ended, one way or another."""


def unfinished(runs: Iterable[Run], store: Store) -> list[Run]:
    """Keep the runs that have no record, own or committed."""
    return [run for run in runs if store.find(run) is None]


def run_all(
    runs: Sequence[Run],
    store: Store,
    engine: Engine,
    *,
    listener: Listener,
    should_stop: Callable[[], bool],
    again: bool = False,
) -> list[Outcome]:
    """Make the runs that are not finished, or all of them `again`, and write their records.

    A run that fails does not keep the others from being made, unless they would fail alike.
    """
    outcomes: list[Outcome] = []

    def stops() -> bool:
        return should_stop() or any(outcome.is_fatal for outcome in outcomes)

    def waiting() -> Iterator[Run]:
        # Looked up again for each: another command may have finished it meanwhile.
        return (run for run in runs if again or store.find(run) is None)

    for outcome in engine.make(waiting(), store.folder, listener.progressed, stops):
        outcome = _keep(outcome, store)
        outcomes.append(outcome)
        listener.ended(outcome)
    return outcomes


def _keep(outcome: Outcome, store: Store) -> Outcome:
    """Write the record of a finished run; only then are its checkpoints of no more use."""
    if outcome.record is None:
        return outcome
    try:
        store.write(outcome.run, outcome.record)
    except OSError as error:
        return Outcome(outcome.run, "failed", message=str(error), is_fatal=True)
    remove_checkpoints(store.folder(outcome.run))
    return outcome


class Stop:
    """Turns the first Ctrl-C into a request to stop, the second into the usual interruption."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.asked = False
        self._tell = tell

    def __call__(self) -> bool:
        return self.asked

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM, where this thread may."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self._handle) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._tell()
