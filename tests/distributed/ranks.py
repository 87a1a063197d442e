"""Processes that stand for ranks: started once, and given one function after the other."""

import itertools
import multiprocessing
import os
import tempfile
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist

SECONDS = 120  # for one function, and for a rank to begin: on a busy machine imports take long


def work(pipe, store, rank, size):
    """Be a rank: run what comes down the pipe, and send back what it returns."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size,
        timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    while True:
        asked = pipe.recv()
        if asked is None:
            break
        function, given = asked
        try:
            pipe.send((True, function(**given)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
            break
    dist.destroy_process_group()


class Ranks:
    """So many ranks on gloo; `run` calls a function on each and returns what each returned."""

    def __init__(self, size):
        self.size, self.folder = size, tempfile.TemporaryDirectory()
        context, store = multiprocessing.get_context("spawn"), Path(self.folder.name) / "store"
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, store, rank, size), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before

    def run(self, function, **given):
        assert self.pipes, f"one of {self.size} ranks has said nothing before"
        for pipe in self.pipes:
            pipe.send((function, given))
        found, waiting = {}, dict(zip(self.pipes, range(self.size), strict=True))
        while waiting:
            ready = connection.wait(waiting, timeout=2 * SECONDS)
            if not ready:
                self.pipes = []  # whose answers would be taken for those of the next function
            assert ready, f"ranks {list(waiting.values())} of {self.size} say nothing"
            for pipe in ready:
                rank = waiting.pop(pipe)
                well, found[rank] = pipe.recv()
                assert well, f"rank {rank} of {self.size}:\n{found[rank]}"
        return [found[rank] for rank in range(self.size)]

    def close(self):
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                continue
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
        self.folder.cleanup()


def shares_of(length, size, uneven=False):
    """Cut a length into shares: nearly equal ones, or of very different sizes."""
    weights = [1 + 3 * ((rank * 5 + 2) % 4) if uneven else 1 for rank in range(size)]
    edges = [round(length * sum(weights[:rank]) / sum(weights)) for rank in range(size + 1)]
    return [stop - start for start, stop in itertools.pairwise(edges)]
