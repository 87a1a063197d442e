"""Two processes on one batch do what one does, each with its part."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import Parity, TinyConfig

from smat.models import ModelConfig
from smat.training import TrainingConfig, load_weights, train
from smat.training.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIG = TrainingConfig(steps=20, batch_size=8, learning_rate=1e-2, eval_every=10)

HEADS = ModelConfig(
    "deltanet", width=16, options={"num_heads": 2, "head_dim": 8}, mlp_ratio=2.0, tied=True
)

SCRIPT = """
import sys
import test_distributed as here
from smat.training import Interrupted
from smat.training.fabric import make_fabric

strategy, folder, steps, parts = sys.argv[1:]
fabric = make_fabric("cpu", strategy=strategy, num_devices=2)
try:
    ways = {"sharded": strategy == "fsdp", "over_heads": strategy == "tensor"}
    here.fit(folder, int(steps), int(parts), fabric=fabric, **ways)
except Interrupted:
    pass
"""


def fit(folder, stop_after=20, accumulate=1, heads=False, **options):
    torch.manual_seed(0)
    # Dropout is drawn by each process for itself.
    kind = HEADS if heads or options.get("over_heads") else TinyConfig(dropout=0.0)
    model = kind.build(Parity())
    config, taken = CONFIG.changed(accumulate=accumulate), iter(range(1, 21))
    stops = {"should_stop": lambda: next(taken) == stop_after}
    return train(model, Parity(), config, folder, seed=1, **stops, **options)


def fit_with_two(strategy, folder, steps, parts):
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    folders = [ROOT, ROOT / "tests" / "experiments", Path(__file__).parent]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(script), strategy, str(folder), str(steps), str(parts)],
        env=environment, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def assert_same_weights(folder, other):
    one, two = load_weights(folder), load_weights(other)
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("strategy", "parts"), [("ddp", 1), ("ddp", 2), ("fsdp", 2), ("tensor", 2)]
)
def test_two_processes_reach_the_weights_of_one(strategy, parts, tmp_path):
    fit_with_two(strategy, tmp_path / "two", 20, parts)
    fit(tmp_path / "one", heads=strategy == "tensor", device="cpu")
    assert_same_weights(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tensor"])
def test_one_process_goes_on_where_two_have_stopped(strategy, tmp_path):
    fit_with_two(strategy, tmp_path / "two", 7, 1)
    state, _ = load_checkpoint(tmp_path / "two")
    assert state["step"] == 7
    for folder in ("two", "one"):
        fit(tmp_path / folder, heads=strategy == "tensor", device="cpu")
    assert_same_weights(tmp_path / "one", tmp_path / "two")


def test_a_batch_that_does_not_divide_is_refused(monkeypatch):
    from smat.training.fabric import make_fabric
    from smat.training.trainer import Trainer

    fabric = make_fabric("cpu")
    monkeypatch.setattr(type(fabric), "world_size", 3)
    with pytest.raises(ValueError, match="a batch of 8 does not divide over 3 devices"):
        Trainer(fabric, TinyConfig().build(Parity()), Parity(), CONFIG, seed=0)
