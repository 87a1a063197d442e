"""Wheel and source package, installed where nothing else is: they import, run and train."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import smat
from smat.ops.native.build import find_compiler

ROOT = Path(__file__).parents[1]
OTHERS = ["3.10", "3.12", "3.13"]

USE = """
import doctest, importlib, pkgutil, sys, warnings
import smat
assert "site-packages" in smat.__file__, smat.__file__
warnings.simplefilter("ignore", smat.SMatWarning)
for name in ("numpy", "typer", "transformers", "triton", "safetensors"):
    assert importlib.util.find_spec(name) is None, name
num_tried = 0
for room in ("geometry", "masks", "ops", "layers"):
    package = importlib.import_module(f"smat.{room}")
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".triton" in found.name or ".native" in found.name:
            continue  # what needs an extra, or a compiler
        flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
        done = doctest.testmod(importlib.import_module(found.name), optionflags=flags)
        assert not done.failed, found.name
        num_tried += done.attempted
assert num_tried > 100, num_tried

import torch
torch.manual_seed(0)
layer = smat.SMatAttention(32, vc_dim=3, horizon=128, chunk_size=8)
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
x, target = torch.randn(2, 4, 100, 32)
losses = []
for _ in range(5):
    loss = (layer(x)[0] - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0], losses
print(smat.__version__, num_tried, "doctests")
"""

USE_NATIVELY = """
import logging
import torch, smat
from smat.ops.native.build import cached_libraries
assert "site-packages" in smat.__file__, smat.__file__
logging.getLogger("smat").addHandler(logging.StreamHandler())
torch.manual_seed(0)
mask, tensors = smat.SMatMask(512, 3), torch.randn(3, 1, 512, 2, 16).unbind(0)
answers = {}
for name in ("torch", "native"):
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    out, state = smat.smat_attention(q, k, v, mask, output_final_state=True, backend=name)
    token = [x.detach()[:, 0] for x in (q, k, v)]
    step, _ = state.step(*token, backend=name)
    answers[name] = [out, step, *torch.autograd.grad(out.square().sum(), (q, k, v))]
for found, expected in zip(answers["native"], answers["torch"]):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
print([path.name.split("-")[0] for path in cached_libraries()])
"""


def run(*command, cwd, **environment):
    """Run a command outside the checkout; its output is part of what a failure says."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def new_environment(folder):
    run(sys.executable, "-m", "venv", str(folder), cwd=folder.parent)
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Build the source package, and from it the wheel, as an index would get them."""
    folder = tmp_path_factory.mktemp("packages")
    python = new_environment(folder / "builder")
    run(python, "-m", "pip", "install", "-q", "build", cwd=folder)
    run(python, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT), cwd=folder)
    return folder / "dist"


@pytest.mark.slow
def test_the_packages_have_the_version_and_all_files(packages):
    (wheel,) = packages.glob("*.whl")
    (source,) = packages.glob("*.tar.gz")
    assert wheel.name == f"smat-{smat.__version__}-py3-none-any.whl"
    assert source.name == f"smat-{smat.__version__}.tar.gz"
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("smat/")}
    tracked = run("git", "ls-files", "smat", cwd=ROOT).split()
    assert held == set(tracked)  # the wheel is built from the source package, so that has them too


@pytest.mark.slow
def test_the_wheel_runs_with_torch_alone(packages, tmp_path):
    (wheel,) = packages.glob("*.whl")
    python = new_environment(tmp_path / "clean")
    constraint = f"--constraint={ROOT / 'constraints.txt'}"
    run(python, "-m", "pip", "install", "-q", constraint, str(wheel), cwd=tmp_path)
    said = run(python, "-W", "ignore:Failed to initialize NumPy", "-c", USE, cwd=tmp_path)
    assert said.startswith(smat.__version__)
    if find_compiler():
        own = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        said = run(python, "-W", "ignore", "-c", USE_NATIVELY, cwd=tmp_path, **own)
        assert said == "['causal', 'causal_backward', 'long_range', 'step']\n"


def other_python(version):
    """Find an interpreter of another version that starts."""
    managed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in [*map(str, managed), shutil.which(f"python{version}")]:
        if path and not subprocess.run([path, "-c", ""], capture_output=True).returncode:
            return path
    return None


@pytest.mark.parametrize("version", OTHERS)
def test_every_file_compiles_and_what_needs_no_torch_imports(version):
    python = other_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    script = """
import pathlib, sys
for path in sys.argv[1:]:
    compile(pathlib.Path(path).read_text(encoding="utf-8"), path, "exec")
import smat, smat.console, smat.extras
assert "torch" not in sys.modules and "SMatMask" in dir(smat)
"""
    files = [str(path) for room in ("smat", "tests", "tools", "examples")
             for path in sorted((ROOT / room).rglob("*.py"))]  # fmt: skip
    assert len(files) > 200
    run(python, "-c", script, *files, cwd=ROOT.parent, PYTHONPATH=str(ROOT))
