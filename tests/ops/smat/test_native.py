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
from smat.ops import backend
from smat.ops.linear.native import causal
from smat.ops.native import build
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
SANITIZERS = "-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all"


def check_natively(call):
    """Let a drawn call, however short, take the kernels."""
    with mock.patch.object(backend, "NATIVE_TOKENS", 0):
        check_call(call)


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_child_does_not_hang():
    inputs, mask = large()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected, _ = smat.smat_attention(mask=mask, **inputs, backend="native")
        child = os.fork()
        if not child:
            signal.alarm(60)
            call = causal.Causal(
                *(inputs[name] for name in ("q", "k", "v", "log_decay")), None,
                [(0, (smat.masks.Segment(0, 512, 0),))], "elu", True,
            )  # fmt: skip
            out, total = torch.empty_like(expected), torch.empty(expected.shape[:3])
            call.attend(out, total, adds=False)
            torch.set_num_threads(1)  # a parallel operation of torch itself would wait for ever
            os._exit(int(not torch.equal(out, expected)))
        assert os.waitpid(child, 0)[1] == 0
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


@pytest.mark.slow
def test_under_sanitizers(tmp_path):
    """Address and undefined-behaviour checks over the grid; what is wrong ends the process."""
    library = subprocess.run(
        [*build.find_compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True
    ).stdout.strip()
    if not os.path.isabs(library):
        pytest.skip("the compiler has no address sanitizer")
    environment = os.environ | {
        "SMAT_NATIVE_FLAGS": SANITIZERS, "LD_PRELOAD": library, "XDG_CACHE_HOME": str(tmp_path),
        "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2",
    }  # fmt: skip
    files = [__file__, str(Path(__file__).parents[1] / "delta_rule" / "test_native.py")]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        [*command, "-k", "not sanitizers and not fork"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
