"""A full disk, a damaged checkpoint, a missing extra: one clear line each, and nothing is lost."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("typer")

import tiny_table
from tiny import changed

from smat.__main__ import main
from smat.experiments import store
from smat.experiments.store import Store
from smat.experiments.tables import EXPERIMENTS
from smat.training import DiskFullError, Interrupted, train
from smat.training.checkpoint import (
    CURRENT,
    PREVIOUS,
    WEIGHTS,
    load_checkpoint,
    save_checkpoint,
    write_atomically,
)

NOWHERE = Path("nowhere")
ONE = ["run", "parity", "--preset", "quick", "--seeds", "0", "--only", "wide", "--only", "T=4"]
ONE += ["--device", "cpu"]


def often(preset, seeds):
    """The tiny runs, shorter, with a checkpoint after every step."""
    runs = tiny_table.runs(preset, seeds)
    training = changed(runs[0].training, steps=12, checkpoint_seconds=0.0)
    return [changed(run, training=training) for run in runs]


(RUN,) = (run for run in often("quick", [0]) if (run.arm, run.cell) == ("wide", "T=4"))


@pytest.fixture
def smat(capsys, monkeypatch):
    """Run a command on the tiny experiment; return its exit status and what it printed."""
    monkeypatch.setitem(EXPERIMENTS, "parity", replace(tiny_table.PARITY, runs=often))

    def command(*arguments):
        status = main(arguments)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return command


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own with room for two checkpoints, not three; it can be made larger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"cannot mount a tmpfs: {error}")
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def failures(err):
    return [line for line in err.splitlines() if line.startswith("failed: ")]


def test_a_full_disk_is_one_line_and_the_checkpoint_before_stays_whole(smat, small_disk, tmp_path):
    status, _, err = smat(*ONE, "--out", str(small_disk))
    assert status == 1
    (line,) = failures(err)
    assert line.startswith(f"failed: wide T=4 seed 0: no room for {small_disk}")
    assert "MB are free; what was written before is whole" in line
    assert "Traceback" not in err
    folder = Store(small_disk, NOWHERE).folder(RUN)
    state, note = load_checkpoint(folder)
    assert note is None
    assert 0 < state["step"] < RUN.training.steps

    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    status, _, err = smat(*ONE, "--out", str(small_disk))
    assert status == 0, err
    assert smat(*ONE, "--out", str(tmp_path / "whole"))[0] == 0
    whole = Store(tmp_path / "whole", NOWHERE).folder(RUN)
    assert (folder / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def test_a_full_disk_stops_the_table_and_not_only_the_run(smat, small_disk):
    status, _, err = smat("run", "parity", "--device", "cpu", "--out", str(small_disk))
    assert status == 1
    assert len(failures(err)) == 1
    assert "runs are left, 1 failed; go on with:" in err


@contextlib.contextmanager
def small_files(size):
    """Limit the size of files, which the system enforces as it does a full disk.

    Only for a few lines: pytest itself may be writing to a file.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path):
    save_checkpoint(tmp_path, {"step": 1})
    no_room = f"no room for {tmp_path / CURRENT}: it needs"
    with pytest.raises(DiskFullError, match=no_room), small_files(100):
        save_checkpoint(tmp_path, {"step": 2})
    assert load_checkpoint(tmp_path) == ({"step": 1}, None)
    assert [path.name for path in tmp_path.iterdir()] == [CURRENT]


def test_a_record_that_does_not_fit_leaves_the_run_resumable(smat, tmp_path, monkeypatch):
    real = write_atomically

    def full(path, content, keep_as=None):
        if path.parent.name == "wide":  # the folder of this arm's records
            raise DiskFullError(f"no room for {path}")
        real(path, content, keep_as)

    monkeypatch.setattr(store, "write_atomically", full)
    status, _, err = smat(*ONE, "--out", str(tmp_path))
    assert status == 1
    (line,) = failures(err)
    assert "no room for" in line
    monkeypatch.undo()
    monkeypatch.setitem(EXPERIMENTS, "parity", replace(tiny_table.PARITY, runs=often))
    folder = Store(tmp_path, NOWHERE).folder(RUN)
    assert load_checkpoint(folder)[0]["step"] == RUN.training.steps
    before = (folder / WEIGHTS).read_bytes()
    assert smat(*ONE, "--out", str(tmp_path))[0] == 0
    assert (folder / WEIGHTS).read_bytes() == before


@pytest.fixture
def interrupted(tmp_path):
    """A folder of a run that was stopped after a few steps."""
    folder = Store(tmp_path, NOWHERE).folder(RUN)
    calls = []
    with pytest.raises(Interrupted):
        train(
            RUN.model.build(RUN.task), RUN.task, RUN.training, folder, device="cpu",
            should_stop=lambda: calls.append(1) or len(calls) > 5,
        )  # fmt: skip
    return folder


def test_a_damaged_checkpoint_is_told_and_the_one_before_goes_on(smat, tmp_path, interrupted):
    (interrupted / CURRENT).write_bytes(b"gone")
    status, _, err = smat(*ONE, "--out", str(tmp_path))
    assert status == 0
    (line,) = (line for line in err.splitlines() if "damaged" in line)
    assert line.startswith(f"wide T=4 seed 0: checkpoint {interrupted / CURRENT} is damaged (")
    assert line.endswith(f"going on from {PREVIOUS}, step 5")


def test_with_every_checkpoint_damaged_the_line_says_what_to_delete(smat, tmp_path, interrupted):
    files = [interrupted / CURRENT, interrupted / PREVIOUS]
    for path in files:
        path.write_bytes(b"gone")
    status, _, err = smat(*ONE, "--out", str(tmp_path))
    assert status == 1
    (line,) = failures(err)
    assert line.endswith(f"to start this run anew: rm {files[0]} {files[1]}")
    for path in files:
        path.unlink()
    assert smat(*ONE, "--out", str(tmp_path))[0] == 0


@pytest.mark.parametrize(
    ("package", "extra", "options"),
    [
        ("lightning", "train", []),
        ("tensorboard", "train", []),
        ("safetensors", "train", []),
        ("ray", "ray", ["--engine", "ray"]),
    ],
)
def test_a_missing_extra_is_one_line_that_names_it(
    smat, tmp_path, monkeypatch, package, extra, options
):
    monkeypatch.setitem(sys.modules, package, None)  # how Python marks what must not be found
    status, out, err = smat(*ONE, *options, "--out", str(tmp_path))
    assert (status, out) == (1, "")
    assert err.splitlines()[-1] == (
        f'smat: error: {package} is not installed; install it with: pip install "smat[{extra}]"'
    )
    assert len(err.splitlines()) == 2  # what was to be done, and why it was not
    assert list(tmp_path.iterdir()) == []


def test_a_cluster_that_does_not_start_is_one_line(smat, tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")

    def refuse(**options):
        raise Exception("The current node timed out during startup.\nMore of it.")

    monkeypatch.setattr(ray, "init", refuse)
    status, _, err = smat(*ONE, "--engine", "ray", "--out", str(tmp_path))
    assert status == 1
    line = "smat: error: Ray does not start: The current node timed out during startup."
    assert err.splitlines()[-1] == line
    assert "Traceback" not in err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_one_line(smat, tmp_path):
    tmp_path.chmod(0o500)
    status, _, err = smat(*ONE, "--out", str(tmp_path / "out"))
    assert status == 1
    (line,) = failures(err)
    assert "Permission denied" in line
