"""Peak memory is what a run needs beyond its inputs and outputs."""

from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("pydantic")

from smat.bench.measure import peak_extra_bytes, read_bytes

MEGABYTE = 1 << 20
WORKLOAD = """
import os
import torch
from smat.bench.measure import Workload

def workload(temporary, output):
    def run():
        torch.ones(temporary, dtype=torch.uint8)
        return torch.ones(output, dtype=torch.uint8)
    return Workload(run, output, lambda: torch.ones(1), torch.device("cpu"))

def broken():
    raise ValueError("no such workload")

def deadly():
    os._exit(1)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "made_up_workload.py").write_text(WORKLOAD)
    monkeypatch.syspath_prepend(tmp_path)
    return import_module("made_up_workload")


def test_temporaries_count_and_outputs_do_not(module):
    # The temporary is gone when the output is made: the peak is the larger one.
    peak = peak_extra_bytes(module.workload, 64 * MEGABYTE, 16 * MEGABYTE)
    assert 46 * MEGABYTE <= peak <= 60 * MEGABYTE


def test_a_workload_that_fails_is_one_line(module):
    with pytest.raises(ValueError, match=r"^no such workload$"):
        peak_extra_bytes(module.broken)


def test_a_workload_that_dies_is_one_line(module):
    with pytest.raises(OSError, match=r"^the process that measured the memory of deadly died$"):
        peak_extra_bytes(module.deadly)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="there is no /proc")
def test_free_memory_is_known():
    assert read_bytes("/proc/meminfo", "MemAvailable") > 0
