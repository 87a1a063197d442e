"""Make runs side by side: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from smat.console import one_line_warnings
from smat.experiments.engine import OnProgress, Outcome, ShouldStop, attempt, now_and_then
from smat.experiments.run import Run
from smat.experiments.store import Store
from smat.extras import require
from smat.machine import num_cores
from smat.training import Progress

ASK_SECONDS = 0.1  # how often a process asks whether to stop
END_SECONDS = 10.0  # how long an idle process may take to end
POLL_SECONDS = 0.5  # how often a cluster is asked
RETRIES = 2  # a run whose node is lost goes on from its checkpoint elsewhere


@dataclass
class ProcessEngine:
    """Several processes, each making one run after another with an even number of the cores."""

    num_processes: int
    device: str = "auto"

    def make(
        self, runs: Iterable[Run], store: Store, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
        """See `smat.experiments.engine.Engine`."""
        waiting, workers = iter(runs), self._workers()
        try:
            while True:
                for worker in workers:
                    if worker.run is None and not should_stop():
                        worker.begin(next(waiting, None), store)
                busy = [worker for worker in workers if worker.run is not None]
                if not busy:
                    return
                if should_stop():
                    for worker in busy:
                        worker.stop()
                ready = wait([worker.pipe for worker in busy], timeout=ASK_SECONDS)
                for worker in (worker for worker in busy if worker.pipe in ready):
                    run, message = worker.receive()
                    if isinstance(message, Outcome):
                        yield message
                    else:
                        on_progress(run, message)
        finally:
            for worker in workers:
                worker.end()

    def _workers(self) -> list[Worker]:
        """Divide the cores, unless the environment has decided, and spread over the GPUs."""
        num_threads = max(1, num_cores() // self.num_processes)
        threads = None if "OMP_NUM_THREADS" in os.environ else num_threads
        devices = [self.device]
        if self.device in ("auto", "cuda") and torch.cuda.is_available():
            devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return [Worker(threads, devices[i % len(devices)]) for i in range(self.num_processes)]


@dataclass
class Worker:
    """A process of ours, started when there is something to do, and again if it dies."""

    num_threads: int | None
    device: str
    run: Run | None = None
    process: BaseProcess | None = None
    pipe: Connection = field(init=False, repr=False)
    is_stopping: bool = False

    def begin(self, run: Run | None, store: Store) -> None:
        """Let the process make a run, if there is one left."""
        if run is None:
            return
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, theirs = context.Pipe()
            arguments = (theirs, self.num_threads, self.device)
            self.process = context.Process(target=serve, args=arguments, daemon=True)
            self.process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
        self.run = run
        self.pipe.send((run, store.folder(run)))

    def stop(self) -> None:
        """Ask the run to write a checkpoint and end."""
        if not self.is_stopping:
            self.is_stopping = True
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
            should_stop = now_and_then(pipe.poll, ASK_SECONDS)
            pipe.send(attempt(run, folder, device, pipe.send, should_stop))


@dataclass
class RayEngine:
    """Ray schedules the runs, each with an even number of the cluster's cores, or one core.

    Folders should lie where every node sees them.
    """

    num_parallel: int | None = None
    device: str = "auto"

    def make(
        self, runs: Iterable[Run], store: Store, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
        """See `smat.experiments.engine.Engine`."""
        ray = require("ray", extra="ray")
        by_key = {run.key: run for run in runs}
        with _connected(ray):
            board = ray.remote(num_cpus=0)(Board).remote()
            work = ray.remote(max_retries=RETRIES, **self._resources(ray))(make_remotely)
            open_tasks = {
                work.remote(run, store.folder(run), self.device, board): run
                for run in by_key.values()
            }
            while open_tasks:
                if (
                    should_stop()
                ):  # told before waiting: a run that waits for an answer frees a core
                    board.ask_to_stop.remote()
                ready, _ = ray.wait(list(open_tasks), timeout=POLL_SECONDS)
                for key, progress in ray.get(board.take.remote()):
                    on_progress(by_key[key], progress)
                for task in ready:
                    run = open_tasks.pop(task)
                    try:
                        yield ray.get(task)
                    except ray.exceptions.RayError as error:
                        message = f"Ray lost it ({_first_line(error)}); run the same command again"
                        yield Outcome(run, "failed", message=message)

    def _resources(self, ray: Any) -> dict[str, float]:
        """Say what Ray is to reserve for a run."""
        cluster = ray.cluster_resources()
        resources: dict[str, float] = {"num_cpus": 1}
        if self.num_parallel is not None:
            resources["num_cpus"] = max(1, int(cluster.get("CPU", 1)) // self.num_parallel)
        if self.device.startswith("cuda") or (self.device == "auto" and cluster.get("GPU", 0) > 0):
            resources["num_gpus"] = 1
        return resources


class Board:
    """Where runs leave word of their progress, and read whether to stop."""

    def __init__(self) -> None:
        self.news: list[tuple[str, Progress]] = []
        self.is_stopping = False

    def tell(self, key: str, progress: Progress) -> None:
        """Leave word of a run."""
        self.news.append((key, progress))

    def take(self) -> list[tuple[str, Progress]]:
        """Take what has come in."""
        news, self.news = self.news, []
        return news

    def ask_to_stop(self) -> None:
        """Have every run write a checkpoint and end."""
        self.is_stopping = True

    def stopping(self) -> bool:
        """Tell a run whether to stop."""
        return self.is_stopping


def make_remotely(run: Run, folder: Path, device: str, board: Any) -> Outcome:
    """Make a run in a process of the cluster, with the threads that Ray gives it."""
    ray = require("ray", extra="ray")
    cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    torch.set_num_threads(max(1, int(cores)))

    def tell(progress: Progress) -> None:
        board.tell.remote(run.key, progress)

    def ask() -> bool:
        return bool(ray.get(board.stopping.remote()))

    device = "cuda" if device.startswith("cuda") else device  # Ray shows a run one GPU
    return attempt(run, folder, device, tell, now_and_then(ask, POLL_SECONDS))


@contextlib.contextmanager
def _connected(ray: Any) -> Iterator[None]:
    """Use a Ray that is already connected as it is; else connect to RAY_ADDRESS, or start one."""
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises a plain one if a node does not come up in time
            raise ConnectionError(f"Ray does not start: {_first_line(error)}") from error
    try:
        yield
    except ray.exceptions.RayError as error:
        raise ConnectionError(
            f"the Ray cluster is lost ({_first_line(error)}); run the same command again to go on "
            "from the last checkpoints"
        ) from error
    finally:
        if is_ours:
            ray.shutdown()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
