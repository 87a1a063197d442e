"""A model that is sharded over ranks, with sequences over ranks, learns as one process does."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from smat.training.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"steps": 12, "length": 256, "batch": 2, "width": 32, "keep": 3}
SECONDS = 60  # in which all ranks must have ended after one died


def command(ranks, out, **changes):
    words = [f"--{name}={value}" for name, value in {**SIZES, "out": out, **changes}.items()]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = EXAMPLES / "byte_model_ranks.py"
    return [*launcher, f"--nproc_per_node={ranks}", str(script), *words]


def environment():
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}


def run(ranks, out, **changes):
    done = subprocess.run(
        command(ranks, out, **changes), env=environment(), capture_output=True, text=True,
        check=False, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((out / "losses.json").read_text())


@pytest.fixture(scope="module")
def losses_of_one(monkeypatch_module):
    """Train in this process, without any of what is distributed."""
    from byte_model import ByteModel, read_text
    from byte_model_ranks import draw

    torch.manual_seed(0)
    model, text = ByteModel(SIZES["width"]), read_text(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    losses = []
    for step in range(SIZES["steps"]):
        loss = model.loss(draw(text, step, SIZES["batch"], SIZES["length"]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield patch


def assert_close(found, expected):
    assert found[0] > found[-1] + 0.05, "it has learned nothing"
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    assert max(differences) < 1e-5, differences


def test_four_ranks_share_sequences_and_learn_as_one(tmp_path, losses_of_one):
    assert_close(run(4, tmp_path), losses_of_one)


def test_two_ranks_share_a_sequence_and_two_another(tmp_path, losses_of_one):
    assert_close(run(4, tmp_path, **{"context-ranks": 2}), losses_of_one)


def test_a_rank_that_dies_ends_the_others_and_two_ranks_go_on(tmp_path, losses_of_one):
    begun = subprocess.Popen(
        command(4, tmp_path), env=environment(), stderr=subprocess.PIPE, text=True
    )
    state, deadline = None, time.monotonic() + 400
    while state is None or state["step"] < 6:
        assert begun.poll() is None, begun.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
        state, _ = load_checkpoint(tmp_path)
    children = Path(f"/proc/{begun.pid}/task/{begun.pid}/children").read_text().split()
    killed_at = time.monotonic()
    os.kill(int(children[2]), signal.SIGKILL)
    _, said = begun.communicate(timeout=2 * SECONDS)
    assert begun.returncode != 0
    assert time.monotonic() - killed_at < SECONDS
    assert "exitcode" in said
    state, damage = load_checkpoint(tmp_path)
    assert damage is None
    assert 6 <= state["step"] < SIZES["steps"], "it was too late to kill a rank"
    assert_close(run(2, tmp_path), losses_of_one)
