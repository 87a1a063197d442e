"""Make runs here: one after another in this process, or several processes side by side."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

import torch

from smat.console import one_line_warnings
from smat.experiments.execute import Outcome, attempt
from smat.experiments.run import Run
from smat.machine import num_cores
from smat.training import Progress

ASK_SECONDS = 0.1  # how often a run asks whether to stop
END_SECONDS = 10.0  # how long an idle process may take to end

Place = Callable[[Run], Path]
OnProgress = Callable[[Run, Progress], None]
ShouldStop = Callable[[], bool]


class Engine(Protocol):
    """Makes runs somewhere."""

    def make(
        self, runs: Iterable[Run], place: Place, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
        """Make the runs in their folders and yield what becomes of each, in the order of ending.

        Once `should_stop` says so, no run is begun and those at work keep what they have.
        """


@dataclass
class SerialEngine:
    """One run after another, in this process."""

    device: str = "auto"

    def make(
        self, runs: Iterable[Run], place: Place, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
        """See `Engine`."""
        for run in runs:
            if should_stop():
                return

            def tell(progress: Progress, run: Run = run) -> None:
                on_progress(run, progress)

            yield attempt(
                run, place(run), device=self.device, on_progress=tell, should_stop=should_stop
            )


@dataclass
class ProcessEngine:
    """Several processes, each making one run after another with its share of the cores."""

    num_processes: int
    device: str = "auto"

    def make(
        self, runs: Iterable[Run], place: Place, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
        """See `Engine`."""
        waiting = iter(runs)
        workers = [Worker(self._threads(), self._device(i)) for i in range(self.num_processes)]
        try:
            for worker in workers:
                _begin(worker, waiting, place, should_stop)
            while busy := [worker for worker in workers if worker.run is not None]:
                if should_stop():
                    for worker in busy:
                        worker.stop()
                ready = wait([worker.pipe for worker in busy], timeout=ASK_SECONDS)
                for worker in busy:
                    if worker.pipe in ready:
                        run, message = worker.receive()
                        if isinstance(message, Outcome):
                            yield message
                            _begin(worker, waiting, place, should_stop)
                        else:
                            on_progress(run, message)
        finally:
            for worker in workers:
                worker.end()

    def _threads(self) -> int | None:
        """Share the cores, unless the environment has decided."""
        if "OMP_NUM_THREADS" in os.environ:
            return None
        return max(1, num_cores() // self.num_processes)

    def _device(self, index: int) -> str:
        """Spread processes over the GPUs."""
        if self.device not in ("auto", "cuda") or not torch.cuda.is_available():
            return self.device
        return f"cuda:{index % torch.cuda.device_count()}"


def _begin(worker: Worker, waiting: Iterator[Run], place: Place, should_stop: ShouldStop) -> None:
    run = None if should_stop() else next(waiting, None)
    if run is not None:
        worker.begin(run, place(run))


@dataclass
class Worker:
    """A process of ours, started when there is something to do, and again if it dies."""

    num_threads: int | None
    device: str
    run: Run | None = None
    process: BaseProcess | None = None
    pipe: Connection = field(init=False, repr=False)
    stopping: bool = False

    def begin(self, run: Run, folder: Path) -> None:
        """Let the process make a run."""
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            arguments = (theirs, self.num_threads, self.device)
            self.process = context.Process(target=serve, args=arguments, daemon=True)
            self.process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
        self.run = run
        self.pipe.send((run, folder))

    def stop(self) -> None:
        """Ask the run to write a checkpoint and end."""
        if not self.stopping:
            self.stopping = True
            with contextlib.suppress(OSError):
                self.pipe.send(None)

    def receive(self) -> tuple[Run, Progress | Outcome]:
        """Take what the process has to say of its run; if it died, say so."""
        run = self.run
        assert run is not None
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            message = self._death(run)
        if isinstance(message, Outcome):
            self.run = None
        return run, message

    def end(self) -> None:
        """End the process, at once if it is still at work: its last checkpoint is whole."""
        if self.process is None:
            return
        if self.run is not None:
            self.process.kill()
        self.pipe.close()
        self.process.join(END_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process = None

    def _death(self, run: Run) -> Outcome:
        assert self.process is not None
        self.process.join()
        code = self.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        self.pipe.close()
        self.process = None
        message = f"its process ended with {how}; run the same command again to go on from "
        return Outcome(run, "failed", message=f"{message}its last checkpoint")


def serve(pipe: Connection, num_threads: int | None, device: str) -> None:
    """Make the runs that come through a pipe, until it says None or its other end is gone."""
    # Ctrl-C reaches every process of a terminal; the one that started us asks us to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    with contextlib.suppress(EOFError, OSError), one_line_warnings():
        while (job := pipe.recv()) is not None:
            run, folder = job
            pipe.send(
                attempt(
                    run,
                    folder,
                    device=device,
                    on_progress=pipe.send,
                    should_stop=now_and_then(pipe.poll, ASK_SECONDS),
                )
            )


def now_and_then(ask: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """Ask a dear question no more often than every so many seconds.

    >>> ask = now_and_then(iter([False, True]).__next__, seconds=1000)
    >>> ask(), ask()
    (False, False)
    """
    last = -seconds
    answer = False

    def asked() -> bool:
        nonlocal last, answer
        if not answer and time.monotonic() - last >= seconds:
            last, answer = time.monotonic(), ask()
        return answer

    return asked
