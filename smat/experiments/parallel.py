"""Make runs side by side: in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from smat.console import one_line_warnings
from smat.experiments.engine import OnProgress, Outcome, ShouldStop, attempt, now_and_then
from smat.experiments.run import Run
from smat.experiments.store import Store
from smat.extras import require
from smat.machine import num_cores
from smat.training import Progress

ASK_SECONDS = 0.1  # how often a process asks whether to stop
END_SECONDS = 10.0  # how long a process may take to end after its run
POLL_SECONDS = 0.5  # how often a cluster is asked
RETRIES = 2  # a run whose node is lost goes on from its checkpoint elsewhere


class Job(NamedTuple):
    """A run and the process that makes it."""

    run: Run
    device: str
    process: BaseProcess
    pipe: Connection

    def receive(self) -> Progress | Outcome:
        """Take what the process has to say; if it died, say so."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
        code = self.process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        message = f"its process ended with {how}; run the same command again to go on from its "
        return Outcome(self.run, "failed", message=f"{message}last checkpoint")


@dataclass
class ProcessEngine:
    """A process for each run, several at a time, each with an even number of the cores."""

    num_processes: int
    device: str = "auto"

    def __call__(
        self, runs: Iterable[Run], store: Store, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
        waiting, free, is_stopping = iter(runs), self._devices(), False
        jobs: list[Job] = []
        try:
            while True:
                while free and not should_stop() and (run := next(waiting, None)) is not None:
                    jobs.append(self._start(run, store.folder(run), free.pop(0)))
                if not jobs:
                    return
                if should_stop() and not is_stopping:
                    is_stopping = True
                    for job in jobs:
                        with contextlib.suppress(OSError):
                            job.pipe.send("stop")
                ready = wait([job.pipe for job in jobs], timeout=ASK_SECONDS)
                for job in [job for job in jobs if job.pipe in ready]:
                    message = job.receive()
                    if isinstance(message, Outcome):
                        jobs.remove(job)
                        job.process.join(END_SECONDS)
                        free.append(job.device)
                        yield message
                    else:
                        on_progress(job.run, message)
        finally:
            for job in jobs:
                job.process.kill()  # its last checkpoint is whole
                job.process.join()

    def _devices(self) -> list[str]:
        """Spread the processes over the GPUs."""
        devices = [self.device]
        if self.device in ("auto", "cuda") and torch.cuda.is_available():
            devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        return [devices[i % len(devices)] for i in range(self.num_processes)]

    def _start(self, run: Run, folder: Path, device: str) -> Job:
        """Start a process; the cores are divided, unless the environment has decided."""
        num_threads = max(1, num_cores() // self.num_processes)
        threads = None if "OMP_NUM_THREADS" in os.environ else num_threads
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, run, folder, device, threads)
        process = context.Process(target=make_in_process, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is the end of the pipe
        return Job(run, device, process, ours)


def make_in_process(
    pipe: Connection, run: Run, folder: Path, device: str, num_threads: int | None
) -> None:
    """Make a run, until a word comes through the pipe or its other end is gone."""
    # Ctrl-C reaches every process of a terminal; the one that started us asks us to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    with contextlib.suppress(OSError), one_line_warnings():
        should_stop = now_and_then(pipe.poll, ASK_SECONDS)
        pipe.send(attempt(run, folder, device, pipe.send, should_stop))


@dataclass
class RayEngine:
    """Ray schedules the runs, each with an even number of the cluster's cores, or one core.

    Folders should lie where every node sees them.
    """

    num_parallel: int | None = None
    device: str = "auto"

    def __call__(
        self, runs: Iterable[Run], store: Store, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
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
                if should_stop():
                    board.stop.remote()
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
        self.news.append((key, progress))

    def take(self) -> list[tuple[str, Progress]]:
        news, self.news = self.news, []
        return news

    def stop(self) -> None:
        self.is_stopping = True

    def stopping(self) -> bool:
        return self.is_stopping


def make_remotely(run: Run, folder: Path, device: str, board: Any) -> Outcome:
    """Make a run in a process of the cluster, with the threads that Ray gives it."""
    ray = require("ray", extra="ray")
    cores = ray.get_runtime_context().get_assigned_resources().get("CPU", 1)
    torch.set_num_threads(max(1, int(cores)))
    tell = partial(board.tell.remote, run.key)
    device = "cuda" if device.startswith("cuda") else device  # Ray shows a run one GPU
    with watched(lambda: ray.get(board.stopping.remote()), POLL_SECONDS) as should_stop:
        return attempt(run, folder, device, tell, should_stop)


@contextlib.contextmanager
def watched(ask: Callable[[], bool], seconds: float) -> Iterator[ShouldStop]:
    """Ask again and again in a thread; give what tells the last answer and waits for the first.

    The first thread of a Ray task may not ask: while it waits Ray lends its core to another run.
    """
    asked, stop, over = threading.Event(), threading.Event(), threading.Event()

    def watch() -> None:
        try:
            while not ask():
                asked.set()
                if over.wait(seconds):
                    return
        finally:  # also where nobody answers any more: then nobody waits for the run
            stop.set()
            asked.set()

    def should_stop() -> bool:
        asked.wait()
        return stop.is_set()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield should_stop
    finally:
        over.set()
        thread.join(END_SECONDS)


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
        message = f"the Ray cluster is lost ({_first_line(error)}); run the same command again to "
        raise ConnectionError(f"{message}go on from the last checkpoints") from error
    finally:
        if is_ours:
            ray.shutdown()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
