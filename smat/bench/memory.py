"""Measure peak memory beyond inputs and outputs: by resident pages in a fresh process, on a CPU.

A fresh process has no freed memory to hide in. Its inputs are made and written first, the libraries
are warmed up on a small problem, what the allocator still holds is given back, and then the
high-water mark of the resident set is set back and read again after one run.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Workload:
    """Inputs that exist, a run that gives outputs, their bytes, and the same on a small problem."""

    run: Callable[[], object]
    output_bytes: int
    warm: Callable[[], object]
    device: torch.device


def peak_extra_bytes(target: str, arguments: Mapping[str, Any]) -> int:
    """Measure what a workload needs beyond its inputs and outputs, in a process of its own.

    `target` is "module:function" of a function that takes the arguments and returns a `Workload`.
    """
    request = {
        "target": target, "arguments": dict(arguments), "num_threads": torch.get_num_threads(),
    }  # fmt: skip
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-m", "smat.bench.memory"],
        input=json.dumps(request),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ValueError(
            f"measuring the memory of {target} failed with status {done.returncode}: {last}"
        )
    return int(done.stdout.split()[-1])


def measure_here(workload: Workload) -> int:
    """Run a workload in this process, which should be fresh, and return its peak extra bytes."""
    workload.warm()
    if workload.device.type == "cuda":
        return _measure_cuda(workload)
    _give_back()
    before = _resident_bytes()
    _set_back_high_water()
    result = workload.run()
    peak = _high_water_bytes() - before - workload.output_bytes
    del result
    return max(0, peak)


def _measure_cuda(workload: Workload) -> int:
    torch.cuda.synchronize(workload.device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(workload.device)
    before = torch.cuda.memory_allocated(workload.device)
    result = workload.run()
    torch.cuda.synchronize(workload.device)
    peak = torch.cuda.max_memory_allocated(workload.device) - before - workload.output_bytes
    del result
    return max(0, int(peak))


def available_bytes() -> int | None:
    """What the system could still give, None where it does not say."""
    return _kilobytes("/proc/meminfo", "MemAvailable")


def _resident_bytes() -> int:
    now = _kilobytes("/proc/self/status", "VmRSS")
    return _maximum_resident_bytes() if now is None else now


def _high_water_bytes() -> int:
    peak = _kilobytes("/proc/self/status", "VmHWM")
    return _maximum_resident_bytes() if peak is None else peak


def _maximum_resident_bytes() -> int:
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum if sys.platform == "darwin" else 1024 * maximum  # macOS counts in bytes


def _kilobytes(path: str, name: str) -> int | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    found = next((line for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else 1024 * int(found.split()[1])


def _set_back_high_water() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the mark stays: memory that the warm-up needed hides a little of the run's


def _give_back() -> None:
    """Ask the allocator to return freed memory, where it can."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return


def main() -> None:
    """Read a request, run it, print bytes."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["num_threads"])
    module, _, function = request["target"].partition(":")
    print(measure_here(getattr(import_module(module), function)(**request["arguments"])))


if __name__ == "__main__":
    main()
