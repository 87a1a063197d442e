"""bf16 on a CPU that dies of it: op and layers live on, or say why not; others pay nothing."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smat import machine

ROOT = Path(__file__).parents[1]
# A CPU that dies of bf16 products, as long as nothing avoids what kills it.
FAULT = """
import os, pathlib, signal, sys, tempfile, torch
from torch.utils._python_dispatch import TorchDispatchMode
from smat import machine
from tests.layers.mixers import LAYERS, extras, make, tokens

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "_scaled_dot_product")
AVOIDED = {avoided}

class Faulty(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        inputs = [x for x in args if isinstance(x, torch.Tensor)]
        narrow = any(x.dtype == torch.bfloat16 for x in inputs)
        if narrow and name.startswith(PRODUCTS) and not eval(AVOIDED):
            os.kill(os.getpid(), signal.SIGILL)
        return func(*args, **(kwargs or {{}}))

machine.CPUINFO = pathlib.Path(tempfile.mkdtemp()) / "cpuinfo"
machine.CPUINFO.write_text("model name : Faulty\\nflags : fpu avx512_bf16 amx_bf16 amx_tile\\n")
needs = "torch" if "torch" in AVOIDED else "os"
machine.PROBE = f"import os, signal, {{needs}}; {{AVOIDED}} or os.kill(os.getpid(), signal.SIGILL)"
os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
faulty = Faulty()
faulty.__enter__()
x = torch.ones(64, 64, dtype=torch.bfloat16)
"""
LIMITED = "os.environ.get('ONEDNN_MAX_CPU_ISA') == 'AVX512_CORE_FP16'"
WITHOUT = "not torch.backends.mkldnn.enabled"

OP = """
import smat
q, k, v = torch.randn(3, 1, 64, 2, 16, dtype=torch.bfloat16)
smat.smat_attention(q, k, v, smat.SMatMask(64, 2, 8))
x @ x
"""
STATE = """
import smat
state = smat.SMatState.empty(smat.SMatMask(64, 2, 8), 1, 2, 16, 16)
state.step(*torch.randn(3, 1, 2, 16, dtype=torch.bfloat16))
x @ x
"""
EVERY_LAYER = """
for name in LAYERS:
    for dtype in (torch.bfloat16, torch.float32):
        machine._guard_once.cache_clear()
        os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
        layer, (hidden, ids) = make(name, dtype), tokens(2, 20, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            layer(hidden, **extras(layer, ids))
"""
COMPILED = """
layer, (hidden, _) = make("mamba2", torch.bfloat16), tokens(2, 20, torch.bfloat16)
faulty.__exit__(None, None, None)
torch.compile(layer, fullgraph=True, backend="eager")(hidden)
assert eval(AVOIDED)
"""
FULL_PRECISION = """
layer, (hidden, _) = make("smat", torch.float32), tokens(2, 20, torch.float32)
layer(hidden)
assert not eval(AVOIDED) and not machine._guard_once.cache_info().currsize
"""


def run(script, avoided=LIMITED):
    source = FAULT.format(avoided=repr(avoided)) + script
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source], capture_output=True, text=True,
        check=False, timeout=300, cwd=ROOT,
    )  # fmt: skip


def test_without_a_guard_the_fault_kills():
    assert run("x @ x").returncode == -signal.SIGILL


@pytest.mark.parametrize(
    "script", [OP, STATE, EVERY_LAYER, COMPILED, FULL_PRECISION],
    ids=["op", "state", "layers", "compiled", "full-precision"],
)  # fmt: skip
def test_op_and_layers_live_on(script):
    done = run(script)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


def test_where_onednn_has_made_its_choice_torch_does_without_it():
    done = run(OP, WITHOUT)
    assert done.returncode == 0, done.stderr
    assert "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16 before Python starts" in done.stderr


def test_what_nothing_avoids_is_an_error_every_time():
    done = run("for _ in range(2):\n  try: machine.guard_bfloat16()\n"
               "  except RuntimeError as error: print(error)", "False")  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 2
    assert all("bf16 products die on this CPU (Faulty): set ONEDNN_" in line for line in said)


CPU_WITH_AMX = "processor : 0\nflags : fpu avx512_bf16 amx_bf16 amx_tile amx_int8\n"
DIES = f"import os, signal; {LIMITED} or os.kill(os.getpid(), signal.SIGILL)"


@pytest.fixture
def guard(monkeypatch, tmp_path):
    """Run the guard as if for the first time, with other flags of the CPU and another probe."""
    monkeypatch.setenv(machine.ISA, "")
    del os.environ[machine.ISA]

    def guarded(flags, probe, isa=None):
        if isa is not None:
            os.environ[machine.ISA] = isa
        monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
        if flags is not None:
            (tmp_path / "cpuinfo").write_text(flags)
        monkeypatch.setattr(machine, "PROBE", probe)
        machine._guard_once.cache_clear()
        machine.guard_bfloat16()
        machine._guard_once.cache_clear()
        return os.environ.get(machine.ISA)

    return guarded


@pytest.mark.parametrize(
    ("flags", "probe", "isa", "expected"),
    [
        (CPU_WITH_AMX, DIES, None, machine.SAFE_ISA),
        (CPU_WITH_AMX, "pass", None, None),
        (CPU_WITH_AMX.replace("amx", "avx"), DIES, None, None),
        (None, DIES, None, None),
        (CPU_WITH_AMX, DIES, "AVX2", "AVX2"),
    ],
    ids=["dies", "survives", "not-advertised", "no-flags-told", "set-by-the-user"],
)
def test_amx_is_left_out_only_where_it_kills(guard, flags, probe, isa, expected):
    assert guard(flags, probe, isa) == expected
    assert torch.backends.mkldnn.enabled


def test_a_probe_runs_once(guard, tmp_path):
    count = f"open({str(tmp_path / 'probes')!r}, 'a').write('x')"
    guard(CPU_WITH_AMX, count)
    machine.guard_bfloat16()
    machine.guard_bfloat16()
    assert (tmp_path / "probes").read_text() == "xx"  # by hand once, and once for both calls
    machine._guard_once.cache_clear()
