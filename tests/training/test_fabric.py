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
    config = TrainingConfig(4, 8, 1e-2, precision=precision)
    torch.manual_seed(0)
    result = train(TinyConfig().build(Parity()), Parity(), config, tmp_path, device="cpu")
    assert result["curve"][-1][0] == 4


@pytest.mark.parametrize(
    ("advertised", "survives", "expected"),
    [(True, False, fabric.SAFE_ISA), (True, True, None), (False, False, None)],
)
def test_amx_is_left_out_only_where_it_kills(no_isa, monkeypatch, advertised, survives, expected):
    monkeypatch.setattr(fabric, "advertises_amx", lambda: advertised)
    monkeypatch.setattr(fabric, "survives_bfloat16", lambda: survives)
    fabric.guard_bfloat16()
    assert os.environ.get("ONEDNN_MAX_CPU_ISA") == expected


def test_what_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.setattr(fabric, "advertises_amx", lambda: True)
    monkeypatch.setattr(fabric, "survives_bfloat16", lambda: False)
    fabric.guard_bfloat16()
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2"


def test_the_probe_tells_a_process_that_dies_from_one_that_does_not(monkeypatch):
    monkeypatch.setattr(fabric, "PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    assert not fabric.survives_bfloat16()
    monkeypatch.setattr(fabric, "PROBE", "pass")
    assert fabric.survives_bfloat16()


def test_amx_is_read_from_the_processor_flags(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(CPU_WITH_AMX)
    assert fabric.advertises_amx(cpuinfo)
    cpuinfo.write_text(CPU_WITH_AMX.replace("amx", "avx"))
    assert not fabric.advertises_amx(cpuinfo)
    assert not fabric.advertises_amx(tmp_path / "absent")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_refused(device):
    with pytest.raises(ValueError, match=f"device {device} was asked for, but torch sees no GPU"):
        fabric.make_fabric(device)


def test_an_unknown_device_is_refused():
    with pytest.raises(ValueError, match="device is auto, cpu, cuda, cuda:N or mps, not 'tpu'"):
        fabric.make_fabric("tpu")
