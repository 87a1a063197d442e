"""Make runs on a Ray cluster; folders should lie where every node sees them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smat.experiments.engines import OnProgress, Place, ShouldStop, now_and_then
from smat.experiments.execute import Outcome, attempt
from smat.experiments.run import Run
from smat.extras import require
from smat.training import Progress

POLL_SECONDS = 0.5
RETRIES = 2  # a run whose node is lost goes on from its checkpoint elsewhere


@dataclass
class RayEngine:
    """Ray schedules the runs, each with its share of the cluster's cores, or one core.

    A Ray that is already connected is used as it is; else RAY_ADDRESS, or a local cluster.
    """

    num_parallel: int | None = None
    device: str = "auto"

    def make(
        self, runs: Iterable[Run], place: Place, on_progress: OnProgress, should_stop: ShouldStop
    ) -> Iterator[Outcome]:
        """See `Engine`."""
        ray = require("ray", extra="ray")
        started = not ray.is_initialized()
        if started:
            _connect(ray)
        try:
            yield from self._make(ray, list(runs), place, on_progress, should_stop)
        except ray.exceptions.RayError as error:
            raise ConnectionError(
                f"the Ray cluster is lost ({_first_line(error)}); run the same command again to "
                "go on from the last checkpoints"
            ) from error
        finally:
            if started:
                ray.shutdown()

    def _make(
        self,
        ray: Any,
        runs: list[Run],
        place: Place,
        on_progress: OnProgress,
        should_stop: ShouldStop,
    ) -> Iterator[Outcome]:
        board = ray.remote(num_cpus=0)(Board).remote()
        work = ray.remote(max_retries=RETRIES, **self._share(ray))(make_remotely)
        open_tasks = {work.remote(run, place(run), self.device, board): run for run in runs}
        by_key = {run.key: run for run in runs}
        asked = False
        while open_tasks:
            if should_stop() and not asked:
                asked = True
                board.ask_to_stop.remote()
            ready, _ = ray.wait(list(open_tasks), timeout=POLL_SECONDS)
            for key, progress in ray.get(board.take.remote()):
                on_progress(by_key[key], progress)
            for task in ready:
                yield _outcome(ray, task, open_tasks.pop(task))

    def _share(self, ray: Any) -> dict[str, float]:
        cores = int(ray.cluster_resources().get("CPU", 1))
        share: dict[str, float] = {"num_cpus": 1}
        if self.num_parallel is not None:
            share["num_cpus"] = max(1, cores // self.num_parallel)
        has_gpu = ray.cluster_resources().get("GPU", 0) > 0
        if self.device.startswith("cuda") or (self.device == "auto" and has_gpu):
            share["num_gpus"] = 1
        return share


class Board:
    """Where runs leave word of their progress, and read whether to stop."""

    def __init__(self) -> None:
        self.news: list[tuple[str, Progress]] = []
        self.is_stopping = False

    def tell(self, key: str, progress: Progress) -> None:
        """Leave word."""
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

    def ask() -> bool:
        return bool(ray.get(board.stopping.remote()))

    return attempt(
        run,
        folder,
        device="cuda" if device.startswith("cuda") else device,  # Ray shows a run one GPU
        on_progress=lambda progress: board.tell.remote(run.key, progress) and None,
        should_stop=now_and_then(ask, POLL_SECONDS),
    )


def _connect(ray: Any) -> None:
    """Connect to RAY_ADDRESS, or start a local cluster."""
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # Ray raises a plain one where a node does not come up in time
        raise ConnectionError(f"Ray does not start: {_first_line(error)}") from error


def _outcome(ray: Any, task: Any, run: Run) -> Outcome:
    try:
        return ray.get(task)
    except ray.exceptions.RayError as error:
        message = f"Ray lost it ({_first_line(error)}); run the same command again"
        return Outcome(run, "failed", message=message)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
