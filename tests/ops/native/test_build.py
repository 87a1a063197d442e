"""Kernels are compiled once, kept, checked, and done without where they cannot be."""

import importlib
import logging
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import smat
from smat.ops import backend
from smat.ops.native import build

pytestmark = pytest.mark.skipif(not build.find_compiler(), reason="there is no C++ compiler")
SOURCE = '#include "tiles.h"\nextern "C" int answer() { return 42; }\n'
ASK = "import sys; from smat.ops.native.build import load; print(load(sys.argv[1]).answer())"


def forget():
    build._loaded.clear()
    build.find_compiler.cache_clear()
    build.compile_command.cache_clear()
    backend._is_installed.cache_clear()


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A small source, an empty cache, and a compiler that notes when it is called."""
    source, note = tmp_path / "kernel.cpp", tmp_path / "calls"
    source.write_text(SOURCE)
    compiler = tmp_path / "compiler"
    command = " ".join(build.find_compiler())
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || echo called >> {note}\nexec {command} "$@"\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    kept = dict(build._loaded)
    forget()
    yield str(source)
    forget()
    build._loaded.update(kept)


def num_compiled(source):
    note = Path(source).with_name("calls")
    return len(note.read_text().splitlines()) if note.exists() else 0


def test_a_library_is_compiled_once_and_found_again(kernel):
    assert [build.load(kernel).answer() for _ in range(2)] == [42, 42]
    forget()
    assert build.load(kernel).answer() == 42
    assert num_compiled(kernel) == 1
    Path(kernel).write_text(SOURCE.replace("42", "43"))
    forget()
    assert build.load(kernel).answer() == 43
    assert num_compiled(kernel) == 2


@pytest.mark.parametrize("damage", ["truncated", "poisoned", "no checksum"])
def test_a_damaged_library_is_compiled_again(kernel, damage):
    folder = build.cache_folder()
    folder.mkdir(parents=True, mode=0o700)
    library = build._find_or_compile(Path(kernel), folder)  # not loaded: its file is ours to damage
    content = library.read_bytes()
    if damage == "truncated":
        library.write_bytes(content[: len(content) // 2])
    elif damage == "poisoned":
        library.write_bytes(content[:-8] + b"poisoned")
    else:
        build._checksum(library).unlink()
    assert build.load(kernel).answer() == 42
    assert library.read_bytes() == content or build._is_whole(library)
    assert num_compiled(kernel) == 2


def test_of_two_processes_one_compiles(kernel):
    asking = [
        subprocess.Popen([sys.executable, "-c", ASK, kernel], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [each.communicate(timeout=120)[0] for each in asking] == ["42\n", "42\n"]
    assert num_compiled(kernel) == 1


def test_of_four_threads_one_compiles(kernel):
    with ThreadPoolExecutor(4) as pool:
        assert [each.answer() for each in pool.map(build.load, [kernel] * 4)] == [42] * 4
    assert num_compiled(kernel) == 1


@pytest.mark.parametrize("home", ["not a folder", "others may write"])
def test_a_home_that_cannot_be_used(kernel, home, tmp_path, monkeypatch, caplog):
    if home == "not a folder":
        monkeypatch.setenv("XDG_CACHE_HOME", kernel)
    else:
        build.cache_folder().mkdir(parents=True)
        build.cache_folder().chmod(0o777)
    with caplog.at_level(logging.INFO, "smat"):
        assert build.load(kernel).answer() == 42
    assert "for this process alone" in caplog.text
    assert not build.cached_libraries()


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only to root")
def test_a_read_only_home(kernel, tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert build.load(kernel).answer() == 42
    finally:
        tmp_path.chmod(0o700)


def test_a_failed_compile_is_said_once_and_torch_takes_over(kernel, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "false")
    assert build.find_compiler() == ("false",)
    mask, (q, k, v) = smat.SMatMask(96, 2, 8), torch.randn(3, 1, 96, 2, 4)
    expected, _ = smat.smat_attention(q, k, v, mask, backend="torch")
    with caplog.at_level(logging.WARNING, "smat"):
        for _ in range(2):
            found, _ = smat.smat_attention(q, k, v, mask, backend="native")
            assert torch.equal(found, expected)
    causal = [each for each in caplog.messages if "causal.cpp does without" in each]
    assert len(causal) == 1


@pytest.mark.parametrize("missing", ["causal", "causal_backward", "long_range", "step"])
def test_torch_takes_over_where_one_kernel_fails(missing, monkeypatch):
    whole = build.load
    sources = {source.stem: source for source in build.ROOT.rglob("*.cpp")}
    gone = str(sources[missing].relative_to(build.ROOT))
    modules = ("linear.native.causal", "smat.native.long_range", "smat.native.decode")
    for name in (*modules, "smat.native.attention"):
        module = importlib.import_module(f"smat.ops.{name}")
        monkeypatch.setattr(module, "load", lambda name: None if name == gone else whole(name))
    mask, inputs = smat.SMatMask(128, 2, 8), torch.randn(3, 1, 96, 2, 4, requires_grad=True)
    answers = []
    for name in ("torch", "native"):
        out, state = smat.smat_attention(*inputs, mask, backend=name, output_final_state=True)
        (grad,) = torch.autograd.grad(out.square().sum(), inputs)
        answers.append([out, grad, state.step(*inputs.detach()[:, :, 0], backend=name)[0]])
    for expected, found in zip(*answers, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [("SMAT_NATIVE", "0", "SMAT_NATIVE is 0"), ("PATH", "/nonexistent", "no C\\+\\+ compiler")],
)
def test_without_kernels(kernel, name, value, reason, monkeypatch, caplog):
    monkeypatch.delenv("CXX")
    monkeypatch.setenv(name, value)
    forget()
    assert build.load(kernel) is None
    assert backend.available_backends("cpu") == ("torch",)
    mask, x = smat.SMatMask(4096, 1), torch.ones(1, 4096, 1, 2)
    backend.say_once.cache_clear()
    with caplog.at_level(logging.INFO, "smat"):
        for _ in range(2):
            smat.smat_attention(x, x, x, mask)
    assert sum("'torch' backend" in each and "no native" in each for each in caplog.messages) == 1
    with pytest.raises(ValueError, match=f"got 'native'; {reason}"):
        smat.smat_attention(x, x, x, mask, backend="native")


def test_the_wheel_has_the_sources():
    for source in ("native/tiles.h", "linear/native/chunk.h", "linear/native/causal.cpp"):
        assert (build.ROOT / source).is_file()
    ignored = subprocess.run(
        ["git", "check-ignore", "smat/ops/linear/native/causal.cpp", "smat/ops/native/tiles.h"],
        cwd=build.ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert ignored.stdout == ""  # hatchling packs all that git does not ignore
