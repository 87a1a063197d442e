"""Device and precision: what cannot be is refused, and bf16 on a CPU never kills the process."""

import os

import pytest
import torch
from tiny import Parity, TinyConfig

from smat.training import TrainingConfig, fabric, train

CPU_WITH_AMX = "processor : 0\nflags : fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n"


@pytest.fixture
def no_isa(monkeypatch):
    """The environment without the variable, whatever a test sets."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "")
    del os.environ["ONEDNN_MAX_CPU_ISA"]


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions_train_on_a_cpu(tmp_path, precision):
    config = TrainingConfig(steps=4, batch_size=8, learning_rate=1e-2, precision=precision)
    torch.manual_seed(0)
    result = train(TinyConfig().build(Parity()), Parity(), config, tmp_path, device="cpu")
    assert result["curve"][-1][0] == 4


DIES = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


def guard(monkeypatch, cpuinfo, probe):
    monkeypatch.setattr(fabric, "CPUINFO", cpuinfo)
    monkeypatch.setattr(fabric, "PROBE", probe)
    fabric.guard_bfloat16()


@pytest.mark.parametrize(
    ("flags", "probe", "expected"),
    [
        (CPU_WITH_AMX, DIES, fabric.SAFE_ISA),
        (CPU_WITH_AMX, "pass", None),
        (CPU_WITH_AMX.replace("amx", "avx"), DIES, None),
    ],
    ids=["dies", "survives", "not-advertised"],
)
def test_amx_is_left_out_only_where_it_kills(no_isa, monkeypatch, tmp_path, flags, probe, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(flags)
    guard(monkeypatch, cpuinfo, probe)
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == expected


def test_a_system_that_tells_no_flags_is_left_alone(no_isa, monkeypatch, tmp_path):
    guard(monkeypatch, tmp_path / "absent", DIES)
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


def test_what_the_user_has_set_stays(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text(CPU_WITH_AMX)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    guard(monkeypatch, tmp_path / "cpuinfo", DIES)
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=f"device {device} was asked for, but torch sees no GPU"):
        fabric.make_fabric(device)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device is auto, cpu, cuda, cuda:N or mps, not 'tpu'"):
        fabric.make_fabric("tpu")
