"""Kill -9 and Ctrl-C in the middle of a run: started again, it ends in the same weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_table
import torch

from smat.experiments.engine import SerialEngine, run_all
from smat.experiments.store import BusyError, Store, claim
from smat.training.checkpoint import CURRENT, PREVIOUS, WEIGHTS, load_checkpoint

ROOT = Path(__file__).parents[2]
RUN = tiny_table.runs("slow", [0])[0]
PATIENCE = 300.0  # seconds; a busy machine takes long to import


def environment():
    """The environment of a process that imports what this one does, and adds in the same order."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "PYTHONPATH": os.pathsep.join(paths),
    }


def start(root, *options):
    """Start the command in a process of its own."""
    script = Path(tiny_table.__file__)
    arguments = ["run", "parity", "--preset", "slow", "--seeds", "0", "--only", RUN.arm]
    arguments += ["--only", RUN.cell, "--device", "cpu", "--out", str(root), *options]
    return subprocess.Popen(
        [sys.executable, str(script), *arguments], env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wait_for(condition, process=None):
    """Wait until something is so, while the process that brings it about is alive."""
    end = time.monotonic() + PATIENCE
    while not condition():
        if process is not None and process.poll() is not None:
            pytest.fail(f"the process ended too early: {process.communicate()}")
        assert time.monotonic() < end
        time.sleep(0.005)


def finish(store):
    """Go on in this process, to the end."""
    (outcome,) = run_all([RUN], store, SerialEngine("cpu"), lambda *_: None, lambda: False)
    assert outcome.kind == "finished", outcome.message
    return outcome.record


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody interrupts."""
    store = Store(tmp_path_factory.mktemp("whole"), Path("nowhere"))
    record = finish(store)
    return record, (store.folder(RUN) / WEIGHTS).read_bytes()


def step_of(folder):
    state, _ = load_checkpoint(folder)
    return state["step"]


def is_free(folder):
    try:
        with claim(folder):
            return True
    except BusyError:
        return False


@pytest.mark.parametrize("options", [(), ("--jobs", "2")], ids=["serial", "processes"])
def test_killed_and_started_again_a_run_ends_in_the_same_bits(tmp_path, whole, options):
    store = Store(tmp_path, Path("nowhere"))
    folder = store.folder(RUN)
    process = start(tmp_path, *options)
    wait_for((folder / PREVIOUS).exists, process)  # so a second checkpoint is whole
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.communicate()
    wait_for(lambda: is_free(folder))  # a process of ours that lost its parent ends by itself
    step = step_of(folder)
    assert 0 < step < RUN.training.steps
    assert store.find(RUN) is None
    record = finish(store)
    expected, weights = whole
    assert (folder / WEIGHTS).read_bytes() == weights
    for name in ("accuracy", "by_cell", "loss", "curve"):
        assert record[name] == expected[name], name


def test_ctrl_c_keeps_the_last_step_and_says_how_to_go_on(tmp_path, whole):
    store = Store(tmp_path, Path("nowhere"))
    folder = store.folder(RUN)
    process = start(tmp_path)
    wait_for((folder / CURRENT).exists, process)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "stopping at the next step; Ctrl-C again stops at once" in error
    step = step_of(folder)
    assert f"stopped: {RUN.name}: stopped at step {step}, which is kept" in error
    assert "1 of 1 runs are left; go on with:\n  smat run parity --preset slow" in error
    assert f"--out {tmp_path}" in error
    assert "Traceback" not in error
    finish(store)
    assert (folder / WEIGHTS).read_bytes() == whole[1]


@pytest.mark.parametrize("num_kills", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_random_moments_runs_end_in_the_same_bits(tmp_path, num_kills):
    script = Path(tiny_table.__file__).with_name("random_kills.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(tmp_path), str(num_kills), "0"],
        env=environment(), text=True, capture_output=True, check=False, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kills"], found["equal"]) == (num_kills, num_kills)
    # Moments of all kinds: before the first checkpoint, and far into the run.
    assert num_kills < 100 or min(found["steps"]) == 0 < 30 < max(found["steps"])
