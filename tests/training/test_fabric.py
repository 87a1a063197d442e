"""Device and precision: what cannot be is refused, and bf16 on a CPU never kills the process."""

import pytest
import torch
from tiny import Parity, TinyConfig

from smat.training import TrainingConfig, fabric, train


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions_train_on_a_cpu(tmp_path, precision):
    config = TrainingConfig(steps=4, batch_size=8, learning_rate=1e-2, precision=precision)
    torch.manual_seed(0)
    result = train(TinyConfig().build(Parity()), Parity(), config, tmp_path, device="cpu")
    assert result["curve"][-1][0] == 4


def test_bf16_is_guarded_before_the_first_product(monkeypatch):
    asked = []
    monkeypatch.setattr(fabric, "guard_bfloat16", lambda: asked.append(1))
    fabric.make_fabric("cpu", "32-true")
    assert asked == []
    fabric.make_fabric("cpu", "bf16-mixed")
    assert asked == [1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=f"device {device} was asked for, but torch sees no GPU"):
        fabric.make_fabric(device)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device is auto, cpu, cuda, cuda:N or mps, not 'tpu'"):
        fabric.make_fabric("tpu")
