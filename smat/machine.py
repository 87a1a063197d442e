"""Describe where a run happened and from which source, so that its numbers can be judged later."""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
# Parameters of mallopt, by the names that its manual has.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST = 1 << 30


def describe_hardware(device: torch.device | str = "cpu") -> dict[str, str | int]:
    """Collect processor, cores, threads, torch and device as plain data.

    >>> sorted(describe_hardware())
    ['cores', 'cpu', 'device', 'threads', 'torch']
    """
    device = torch.device(device)
    return {
        "cpu": processor_name(),
        "cores": num_cores(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }


def num_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def keep_freed_memory() -> None:
    """Let malloc keep what this process frees, once: a step of training asks for it all again.

    Tensors of many megabytes otherwise come from the system page by page and go back after every
    use, which took more than half of a step of multi-key recall on a CPU. For processes that do
    nothing but train: memory stays with them to their end.
    """
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, LARGEST)
    libc.mallopt(M_TRIM_THRESHOLD, LARGEST)


def processor_name() -> str:
    """Name the processor as the system does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def source_commit(root: Path = PACKAGE.parent) -> str | None:
    """Name the commit of a checkout, with a + if the package differs from it; else None."""
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", "smat")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()
