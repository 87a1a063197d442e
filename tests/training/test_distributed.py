"""Two processes on one batch do what one does, each with its part."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import Parity, TinyConfig

from smat.training import TrainingConfig, load_weights, train

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIG = TrainingConfig(steps=20, batch_size=8, learning_rate=1e-2, eval_every=10)

SCRIPT = """
import sys
import test_distributed as here
from smat.training.fabric import make_fabric

fabric = make_fabric("cpu", strategy="ddp", num_devices=2)
here.fit(sys.argv[1], fabric=fabric)
"""


def fit(folder, **options):
    torch.manual_seed(0)
    model = TinyConfig(dropout=0.0).build(Parity())  # dropout is drawn by each process for itself
    return train(model, Parity(), CONFIG, folder, seed=1, **options)


def test_two_processes_reach_the_weights_of_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    folders = [ROOT, ROOT / "tests" / "experiments", Path(__file__).parent]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path / "two")],
        env=environment, capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    fit(tmp_path / "one", device="cpu")
    one, two = load_weights(tmp_path / "one"), load_weights(tmp_path / "two")
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5)


def test_a_batch_that_does_not_divide_is_refused(monkeypatch):
    from smat.training.fabric import make_fabric
    from smat.training.trainer import Trainer

    fabric = make_fabric("cpu")
    monkeypatch.setattr(type(fabric), "world_size", 3)
    with pytest.raises(ValueError, match="a batch of 8 does not divide over 3 devices"):
        Trainer(fabric, TinyConfig().build(Parity()), Parity(), CONFIG, seed=0)
