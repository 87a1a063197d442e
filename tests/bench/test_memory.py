"""Peak memory is what a run needs beyond its inputs and outputs."""

import pytest

from smat.bench.memory import available_bytes, peak_extra_bytes

MEGABYTE = 1 << 20
WORKLOAD = """
import torch
from smat.bench.memory import Workload

def workload(temporary, output):
    def run():
        torch.ones(temporary, dtype=torch.uint8)
        return torch.ones(output, dtype=torch.uint8)
    return Workload(run, output, lambda: torch.ones(1), torch.device("cpu"))

def broken():
    raise ValueError("no such workload")
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "made_up_workload.py").write_text(WORKLOAD)
    monkeypatch.syspath_prepend(tmp_path)
    return "made_up_workload"


def test_temporaries_count_and_outputs_do_not(module):
    sizes = {"temporary": 64 * MEGABYTE, "output": 16 * MEGABYTE}
    # The temporary is gone when the output is made: the peak is the larger one.
    peak = peak_extra_bytes(f"{module}:workload", sizes)
    assert 46 * MEGABYTE <= peak <= 60 * MEGABYTE


def test_a_workload_that_fails_is_one_line(module):
    with pytest.raises(ValueError, match=r"made_up_workload:broken.*no such workload"):
        peak_extra_bytes(f"{module}:broken", {})


def test_free_memory_is_known_or_not():
    free = available_bytes()
    assert free is None or free > 0
