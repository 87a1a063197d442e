"""The same runs on a Ray cluster, a local one: the same bits, and stopping keeps the step."""

import threading
import warnings
from pathlib import Path

import pytest
import tiny_table

from smat.experiments.engines import SerialEngine
from smat.experiments.ray_engine import RayEngine
from smat.experiments.records import Store
from smat.experiments.runner import run_all
from smat.training.checkpoint import CURRENT, WEIGHTS

ray = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = pytest.mark.slow

NOWHERE = Path("nowhere")


class Notes:
    def __init__(self):
        self.steps = {}

    def progressed(self, run, progress):
        self.steps[run.key] = progress.step

    def ended(self, outcome):
        pass


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray's own start
        patch.setenv("RAY_worker_niceness", "0")  # else nothing is left for them on a busy machine
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_ray_makes_the_same_runs(cluster, tmp_path):
    runs = tiny_table.runs("quick", [0])[:2]
    remote, here = Store(tmp_path / "ray", NOWHERE), Store(tmp_path / "here", NOWHERE)
    notes = Notes()
    engine = RayEngine(device="cpu")
    outcomes = run_all(runs, remote, engine, listener=notes, should_stop=lambda: False)
    assert [outcome.kind for outcome in outcomes] == ["finished", "finished"], outcomes
    assert set(notes.steps) == {run.key for run in runs}
    run_all(runs, here, SerialEngine("cpu"), listener=Notes(), should_stop=lambda: False)
    for run in runs:
        assert (remote.folder(run) / WEIGHTS).read_bytes() == (
            here.folder(run) / WEIGHTS
        ).read_bytes()
        assert remote.find(run)["accuracy"] == here.find(run)["accuracy"]
    assert run_all(runs, remote, engine, listener=notes, should_stop=lambda: False) == []


def test_stopping_keeps_the_step_and_begins_no_other(cluster, tmp_path):
    runs = tiny_table.runs("slow", [0])[:2]
    store, began = Store(tmp_path, NOWHERE), threading.Event()
    notes = Notes()
    notes.progressed = lambda run, progress: progress.step > 0 and began.set()
    outcomes = run_all(
        runs, store, RayEngine(device="cpu"), listener=notes, should_stop=began.is_set
    )
    assert [outcome.kind for outcome in outcomes] == ["stopped", "stopped"]
    kept = [run for run in runs if (store.folder(run) / CURRENT).exists()]
    assert len(kept) == 1
