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
    return train_alone()


def train_alone(narrow=False):
    """Train in this process, without any of what is distributed."""
    from byte_model import ByteModel, read_text
    from byte_model_ranks import draw

    torch.manual_seed(0)
    model, text = ByteModel(SIZES["width"]), read_text(None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    losses = []
    for step in range(SIZES["steps"]):
        windows = draw(text, step, SIZES["batch"], SIZES["length"])
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            logits, _ = model(windows[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), windows[:, 1:].flatten()
        )
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


def assert_close(found, expected, tolerance=1e-5):
    assert found[0] > found[-1] + 0.05, "it has learned nothing"
    differences = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    assert max(differences) < tolerance, differences


def test_four_ranks_share_sequences_and_learn_as_one(tmp_path, losses_of_one):
    assert_close(run(4, tmp_path), losses_of_one)


def test_two_ranks_share_a_sequence_and_two_another(tmp_path, losses_of_one):
    assert_close(run(4, tmp_path, **{"context-ranks": 2}), losses_of_one)


def test_two_ranks_share_heads_and_two_such_pairs_a_sequence(tmp_path, losses_of_one):
    two = {"tensor-ranks": 2}
    run(4, tmp_path, **two, steps=6)
    assert_close(run(4, tmp_path, **two), losses_of_one)  # which goes on from a checkpoint


def test_what_ranks_that_share_heads_kept_goes_on_without(tmp_path, losses_of_one):
    run(4, tmp_path, **{"tensor-ranks": 4}, steps=6)
    assert_close(run(2, tmp_path), losses_of_one)


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_ranks_learn_in_bf16_as_one_process_does(tmp_path, losses_of_one, tensor_ranks):
    """A number of bf16 is off by up to 2^-9: losses of 5.5 nats, by no more than 2^-9 of that."""
    narrow = {"dtype": "bfloat16", "tensor-ranks": tensor_ranks}
    found, tolerance = run(4, tmp_path, **narrow), losses_of_one[0] * 2**-9
    assert_close(found, train_alone(narrow=True), tolerance)
    assert_close(found, losses_of_one, tolerance)


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
