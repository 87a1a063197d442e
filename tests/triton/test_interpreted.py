"""Run the tests of the kernels in Triton's interpreter, each file in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
FILES = sorted(Path(__file__).parent.glob("interpreted/test_*.py"))


def run(path, marked):
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", marked]
    done = subprocess.run(
        [*command, str(path)], env=environment, cwd=Path(__file__).parents[2],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode in (0, 5) if marked == "slow" else done.returncode == 0, (
        done.stdout[-6000:] + done.stderr[-2000:]
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels(path):
    run(path, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kernels_on_the_whole_grid(path):
    run(path, "slow")
