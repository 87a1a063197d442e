"""The same runs on a Ray cluster, a local one: the same bits, and stopping keeps the step."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiny_table

from smat.experiments.engine import SerialEngine, run_all
from smat.experiments.store import Store
from smat.training.checkpoint import CURRENT, WEIGHTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed"),
]

ROOT = Path(__file__).parents[2]
NOWHERE = Path("nowhere")

# In a process of its own: Ray leaves open handles behind, which are errors in this one.
SCRIPT = """
import json, sys, threading
from pathlib import Path
import ray, tiny_table
from smat.experiments.engine import run_all
from smat.experiments.parallel import RayEngine
from smat.experiments.store import Store

told, began = set(), threading.Event()

def note(run, progress):
    told.add(run.key)
    if run.preset == "slow" and progress.step:
        began.set()

def make(preset, should_stop):
    runs = tiny_table.runs(preset, [0])[:2]
    store = Store(Path(sys.argv[1]), Path("nowhere"))
    outcomes = run_all(runs, store, RayEngine(device="cpu"), note, should_stop)
    return [[outcome.run.key, outcome.kind, outcome.message] for outcome in outcomes]

ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
never = lambda: False
found = {"quick": make("quick", never), "again": make("quick", never)}
found["told"] = sorted(told)
found["slow"] = make("slow", began.is_set)
ray.shutdown()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What a cluster with one core makes of the tiny table, and where."""
    root = tmp_path_factory.mktemp("ray")
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, [ROOT, Path(__file__).parent])),
        # A busy machine starves processes as nice as Ray's, which then take long to start.
        "RAY_worker_niceness": "0",
        "RAY_worker_register_timeout_seconds": "600",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(root)],
        env=environment, capture_output=True, text=True, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Store(root, NOWHERE), json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_ray_makes_the_same_runs_once(made, tmp_path, one_thread):
    remote, found = made
    runs = tiny_table.runs("quick", [0])[:2]
    assert sorted(key for key, kind, _ in found["quick"] if kind == "finished") == sorted(
        run.key for run in runs
    ), found
    assert set(found["told"]) == {run.key for run in runs}
    assert found["again"] == []
    here = Store(tmp_path, NOWHERE)
    list(run_all(runs, here, SerialEngine("cpu"), lambda *_: None, lambda: False))
    for run in runs:
        one, other = (store.folder(run) / WEIGHTS for store in (remote, here))
        assert one.read_bytes() == other.read_bytes()
        assert remote.find(run)["accuracy"] == here.find(run)["accuracy"]


def test_stopping_keeps_the_step_and_begins_no_other(made):
    store, found = made
    runs = tiny_table.runs("slow", [0])[:2]
    assert [kind for _, kind, _ in found["slow"]] == ["stopped", "stopped"], found
    assert sorted(message == "not begun" for _, _, message in found["slow"]) == [False, True]
    assert sum((store.folder(run) / CURRENT).exists() for run in runs) == 1
