"""Kill tiny runs at random moments, again and again until they end: arguments ROOT KILLS SEED.

Each attempt is a copy of this process, so that none of its moments goes to imports. It writes a
checkpoint after every step, so that many kills meet one that is being written.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import lightning.fabric  # noqa: F401  (here, so that no copy imports it again)
import tensorboard.compat.proto.event_pb2
import tensorboard.compat.proto.summary_pb2
import tensorboard.summary.writer.record_writer  # noqa: F401
import tiny_table
import torch._dynamo  # noqa: F401

from smat.experiments.engine import SerialEngine, run_all
from smat.experiments.store import Store
from smat.training import fabric
from smat.training.checkpoint import WEIGHTS, newest_step

COMPARED = ("accuracy", "by_cell", "loss", "curve")


def often():
    """A run that keeps every step."""
    run = tiny_table.runs("quick", [0])[0]
    training = type(run.training)(**dict(run.training) | {"checkpoint_seconds": 0.0})
    return type(run)(**{**vars(run), "training": training})


def attempt(run, store, seconds=None):
    """Run on in a copy of this process, and kill it after a while; return whether it was killed."""
    child = os.fork()
    if not child:
        outcomes = list(run_all([run], store, SerialEngine("cpu"), lambda *_: None, lambda: False))
        os._exit(0 if outcomes[0].kind == "finished" else 1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)  # one that has ended stays until it is waited for
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    return status == signal.SIGKILL


def ending(run, store):
    """Return what must be equal, bit for bit."""
    record = store.find(run)
    weights = (store.folder(run) / WEIGHTS).read_bytes().hex()
    return json.dumps([{name: record[name] for name in COMPARED}, weights], sort_keys=True)


def main(root, num_kills, seed):
    run, draw = often(), random.Random(seed)
    fabric.make_fabric("cpu")
    whole = Store(root / "whole", Path("nowhere"))
    attempt(run, whole)  # the first one takes longer
    shutil.rmtree(whole.root)
    start = time.monotonic()
    attempt(run, whole)
    duration = time.monotonic() - start
    kills, equal, ends, steps = 0, 0, 0, []
    while kills < num_kills:
        store = Store(root / f"run{ends}", Path("nowhere"))
        own = 0
        while store.find(run) is None:
            again = kills + own < num_kills
            if attempt(run, store, draw.uniform(0, duration) if again else None):
                own += 1
                steps.append(newest_step(store.folder(run)) or 0)
        kills, ends = kills + own, ends + 1
        equal += own * (ending(run, store) == ending(run, whole))
        shutil.rmtree(store.root)
    print(json.dumps({"kills": kills, "equal": equal, "runs": ends, "steps": steps}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
