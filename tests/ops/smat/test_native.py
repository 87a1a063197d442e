"""The native backend on the op's own grid: against the dense oracle and the torch backend."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given, settings

import smat
from smat.ops.backend import choose_backend
from smat.ops.linear.native import causal
from smat.ops.native import build
from smat.ops.smat.native import decode, long_range
from tests.fuzz.attention import check_call
from tests.ops.smat.comparison import (
    assert_close,
    attend,
    make_inputs,
    mild_gates,
    mixed_gates,
)
from tests.ops.smat.test_attention import calls

pytestmark = [
    pytest.mark.filterwarnings("ignore::smat.SMatWarning"),
    pytest.mark.skipif(build.why_not() is not None, reason="there are no native kernels"),
]
HERE = Path(__file__).parent
SANITIZERS = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"


def check_natively(call):
    """Let a drawn call, however short, take the kernels."""
    with mock.patch.dict(os.environ, {"SMAT_NATIVE": "always"}):
        assert choose_backend("auto", causal.CPU, tokens=1).name == "native"
        check_call(call)


def test_the_kernels_are_here():
    """Where one fails to compile, torch takes over, and nothing else would fail."""
    for source in (causal.SOURCE, causal.BACKWARD_SOURCE, long_range.SOURCE, decode.SOURCE):
        assert build.load(source) is not None, source


@given(calls("float64"))
@settings(max_examples=20)
def test_equals_the_oracle_in_fp64(call):
    check_natively(call)


@given(calls("float32"))
@settings(max_examples=12)
def test_equals_the_oracle_in_fp32(call):
    check_natively(call)


@given(calls("bfloat16"))
@settings(max_examples=5)
def test_equals_the_oracle_in_bf16(call):
    check_natively(call)


@pytest.mark.slow
@given(calls("float64"))
@settings(max_examples=2000)
def test_equals_the_oracle_in_fp64_everywhere(call):
    check_natively(call)


@pytest.mark.parametrize(
    ("dtype", "gates"),
    [
        (torch.float64, None),
        (torch.float64, mild_gates),
        (torch.float64, mixed_gates),
        (torch.float32, mild_gates),
    ],
)
@pytest.mark.parametrize("sharing", ["queries", "values"])
@pytest.mark.parametrize("step", [None, 100])
def test_several_blocks_of_chunks(dtype, gates, sharing, step):
    """More chunks than states are kept of at once, windows that overlap, widths of no vector."""
    length = 1100
    inputs = make_inputs(length, batch=1, group=2, sharing=sharing, key_dim=20, value_dim=17)
    if gates is not None:
        inputs["log_decay"] = gates((1, length, inputs["v"].shape[2]))
    inputs = {name: x.to(dtype) for name, x in inputs.items()}
    boundary = None if step is None else smat.schedules.window(step)
    mask = smat.SMatMask(length, 1 if step is None else 2, boundary=boundary)
    expected = attend(inputs, mask, backend="torch", branch="causal")
    assert_close(attend(inputs, mask, backend="native", branch="causal"), expected, dtype)


def test_packed_sequences_are_one_call():
    inputs, edges = make_inputs(300, batch=1), torch.tensor([0, 1, 140, 140, 300])
    inputs["log_decay"] = mild_gates((1, 300, 2))
    mask = smat.SMatMask(300, 2, 8)
    expected = attend(inputs, mask, cu_seqlens=edges, backend="torch")
    assert_close(attend(inputs, mask, cu_seqlens=edges, backend="native"), expected, torch.float64)


def large():
    """A call that is worth several threads."""
    inputs = make_inputs(512, heads=4, key_dim=64, value_dim=64, dtype=torch.float32)
    return inputs | {"log_decay": mild_gates((2, 512, 4)).float()}, smat.SMatMask(512, 1)


def test_the_same_numbers_from_any_number_of_threads():
    inputs, mask = large()
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(attend(inputs, mask, backend="native"))
    finally:
        torch.set_num_threads(before)
    for out, grads in found[1:]:
        assert torch.equal(out, found[0][0])
        assert all(torch.equal(grad, found[0][1][name]) for name, grad in grads.items())


def test_heads_of_values_are_shared_out_among_threads():
    inputs = make_inputs(512, batch=1, heads=1, group=4, sharing="values", key_dim=64, value_dim=64)
    mask, before = smat.SMatMask(512, 1), torch.get_num_threads()
    inputs["key_gate"] = torch.rand(1, 512, 1, dtype=torch.float64)
    try:
        torch.set_num_threads(3)
        found = attend(inputs, mask, backend="native")
    finally:
        torch.set_num_threads(before)
    assert_close(found, attend(inputs, mask, backend="torch"), torch.float64)


def test_four_threads_of_a_caller():
    inputs, mask = large()
    run = lambda _: smat.smat_attention(mask=mask, **inputs, backend="native")[0]  # noqa: E731
    expected = run(0)
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, expected) for found in pool.map(run, range(8)))


def run_in_fork(check):
    """Let a copy of the process check something within a minute."""
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            os._exit(int(not check()))
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_does_not_hang():
    """Kernels work in torch's threads, none of which survives a fork: there they take one."""
    inputs, mask = large()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.ones(2000, 2000).exp()  # torch has started its threads
    try:
        expected, _ = attend(inputs, mask, backend="native")
        deep, grads = attend(inputs, smat.SMatMask(512, 3), backend="native")

        def check():
            call = causal.Causal(
                *(inputs[name] for name in ("q", "k", "v", "log_decay")), None,
                [(0, (smat.masks.Segment(0, 512, 0),))], "elu", True,
            )  # fmt: skip
            out, total = torch.empty_like(expected), torch.empty(expected.shape[:3])
            call.attend(out, total, adds=False)
            torch.set_num_threads(1)  # as workers of a DataLoader do
            again, grads_again = attend(inputs, smat.SMatMask(512, 3), backend="native")
            same = all(torch.equal(x, grads_again[name]) for name, x in grads.items())
            return same and torch.equal(out, expected) and torch.equal(again, deep)

        run_in_fork(check)
    finally:
        torch.set_num_threads(before)


def test_numbers_that_are_not_finite_stay_so():
    for bad in (float("nan"), float("inf")):
        for name in ("q", "k", "v"):
            inputs = make_inputs(70, batch=1, dtype=torch.float32)
            inputs[name][0, 40] = bad
            out, _ = smat.smat_attention(mask=smat.SMatMask(70, 1), **inputs, backend="native")
            rows = out.isfinite().flatten(2).all(-1)[0]
            assert rows[:32].all()
            assert not rows[40]
            assert not rows[41:].any() or name == "q"


def run_tests(paths, environment, *options):
    """Run tests, the slow ones left out, in another environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, *map(str, paths)], env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[:3000]


@pytest.mark.slow
def test_every_test_of_the_op_with_kernels_alone():
    """Calls that are too small for kernels take them too."""
    others = [path for path in HERE.glob("test_*.py") if "native" not in path.name]
    run_tests(sorted(others), {"SMAT_NATIVE": "always"})


@pytest.mark.slow
def test_under_sanitizers(tmp_path):
    """Address and undefined-behaviour checks over the grid; what is wrong ends the process."""
    libraries = []
    for name in ("libasan.so", "libstdc++.so"):  # whose exceptions the sanitizer must find
        ask = [*build.find_compiler(), f"-print-file-name={name}"]
        libraries.append(subprocess.run(ask, capture_output=True, text=True).stdout.strip())
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("the compiler has no address sanitizer")
    environment = {
        "SMAT_NATIVE_FLAGS": SANITIZERS, "LD_PRELOAD": " ".join(libraries), "OMP_NUM_THREADS": "2",
        "ASAN_OPTIONS": "detect_leaks=0", "XDG_CACHE_HOME": str(tmp_path),
    }  # fmt: skip
    paths = [*HERE.glob("test_native*.py"), HERE.parent / "delta_rule" / "test_native.py"]
    run_tests(sorted(paths), environment, "-s", "-k", "not forked")
