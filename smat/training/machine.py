"""Describe where a run happened and from which source, so that its numbers can be judged later."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parents[1]


def describe_hardware(device: torch.device | str = "cpu") -> dict[str, Any]:
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
