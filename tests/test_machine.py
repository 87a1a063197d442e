"""Memory that a training process frees comes back without page faults."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from smat.machine import OF_A_CALL, OF_TRAINING, keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):  # a small block may once lie in the way
        torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

fresh = faults()
keep_freed_memory(*OF_TRAINING)
keep_freed_memory(*OF_A_CALL)  # as every call of the op asks
faults()
print(fresh, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told")
def test_freed_memory_is_kept():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120
    )
    fresh, kept = (int(word) for word in done.stdout.split())
    assert kept < fresh / 10
