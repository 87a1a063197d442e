"""Check results, time candidates in turns, and measure peak memory in fresh processes.

The speed of a machine drifts with whatever else runs on it: candidates that take turns meet the
same weather, quantiles say how rough it was, page faults say what memory cost.
"""

from __future__ import annotations

import ctypes
import gc
import math
import multiprocessing
import os
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

import smat
from smat.bench.config import Config
from smat.machine import processor_name, source_commit
from smat.ops.backend import available_backends

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
DTYPES |= {"bf16": torch.bfloat16, "fp16": torch.float16}
HALF = (5e-3, 1e-2)
# Of an output and of a gradient, relative RMS.
TOLERANCES = {"fp64": (1e-12, 1e-10), "fp32": (1e-5, 1e-4), "bf16": HALF, "fp16": HALF}
MIN_RUNS = 3
LONG_RUN = 5.0  # seconds from which a first call is no worse than any other, and is kept
CPU = torch.device("cpu")
# Go through items under a bar with the time left, which vanishes at the end.
show_progress = partial(track, console=Console(stderr=True), transient=True, refresh_per_second=1)


def find_device(device: str, dtype: str = "fp32") -> torch.device:
    """Refuse what would not run, before anything is built."""
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device} was asked for, but torch sees no CUDA device")
    if place.type == "cpu" and DTYPES[dtype].itemsize < 4:
        raise ValueError(f"dtype {dtype} is too slow on a CPU to be timed: use fp32 or fp64")
    return place


def forward_backward(
    op: Callable[..., Any], inputs: Mapping[str, Tensor], **options: Any
) -> dict[str, Tensor]:
    """Run an op, and its backward pass if there is a `grad_out` to bring back; results by name."""
    leaves = {name: x for name, x in inputs.items() if name != "grad_out"}
    out = op(**leaves, **options)
    out = out[0] if isinstance(out, tuple) else out
    if "grad_out" not in inputs:
        return {"output": out}
    grads = torch.autograd.grad(out, list(leaves.values()), inputs["grad_out"])
    names = (f"gradient of {name}" for name in leaves)
    return {"output": out, **dict(zip(names, grads, strict=True))}


def check(
    name: str, size: str, found: Mapping[str, Tensor], oracle: Mapping[str, Tensor], dtype: str
) -> list[dict[str, Any]]:
    """Compare results with the oracle's by name: relative root mean squares.

    >>> one, other = {"output": torch.tensor([3.0, 4.4])}, {"output": torch.tensor([3.0, 4.0])}
    >>> check("sum", "T = 2", one, other, "fp32")[0]["error"]
    0.08...
    """
    checks: list[dict[str, Any]] = []
    for quantity, value in found.items():
        right = oracle[quantity].detach().double()
        error = (value.detach().double() - right).norm() / right.norm().clamp_min(1e-300)
        tolerance = TOLERANCES[dtype][quantity.startswith("gradient")]
        checks.append({"name": name, "quantity": quantity, "size": size})
        checks[-1] |= {"error": float(error), "tolerance": tolerance}
    return checks


def begin_record(
    benchmark: str, config: Config, device: torch.device, checks: list[dict[str, Any]]
) -> dict[str, Any]:
    """Begin the record of a benchmark; refuse if a check failed, before anything is timed."""
    for each in checks:
        if not each["error"] <= each["tolerance"]:  # NaN fails
            raise ValueError(
                "{name}: the {quantity} at {size} is off by {error:.1e} relative RMS, more than "
                "{tolerance:.0e}; nothing was timed".format(**each)
            )
    environment = {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "processor": processor_name(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "num_cores": os.cpu_count(),
        "num_threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": available_backends(device)[0],
        "smat": smat.__version__,
        "commit": source_commit(),
    }
    given = {"benchmark": benchmark, "environment": environment, "config": config.record()}
    return {**given, "checks": checks}


class Reading(NamedTuple):
    """What one call cost: seconds and page faults."""

    seconds: float
    minor_faults: int
    major_faults: int


class Timing(NamedTuple):
    """The calls of one candidate: seconds, quantiles at 20 and 80 %, and page faults a call."""

    median: float
    low: float
    high: float
    slowest: float
    num_runs: int
    minor_faults: float
    major_faults: float

    def ratio_to(self, baseline: Timing) -> float:
        """How many times the baseline's median this median is."""
        return self.median / baseline.median


def sum_up(readings: Sequence[Reading]) -> Timing:
    """Sum up the readings of one candidate.

    >>> sum_up([Reading(seconds, 0, 0) for seconds in (4.0, 1.0, 3.0, 2.0, 5.0)]).low
    1.8
    """
    seconds, minor, major = zip(*readings, strict=True)
    sample = torch.tensor(seconds, dtype=torch.float64)
    low, high = (sample.quantile(fraction).item() for fraction in (0.2, 0.8))
    faults = float(median(minor)), float(median(major))
    return Timing(median(seconds), low, high, max(seconds), len(seconds), *faults)


def read_once(call: Call, device: torch.device = CPU) -> Reading:
    """Call once; giving the result's memory back is not timed."""
    import resource  # which not every system has

    before = resource.getrusage(resource.RUSAGE_SELF)
    result, seconds = (_time_on_gpu if device.type == "cuda" else _time_on_cpu)(call)
    after = resource.getrusage(resource.RUSAGE_SELF)
    del result
    faults = after.ru_minflt - before.ru_minflt, after.ru_majflt - before.ru_majflt
    return Reading(seconds, *faults)


def _time_on_cpu(call: Call) -> tuple[object, float]:
    start = perf_counter()
    result = call()
    return result, perf_counter() - start


def _time_on_gpu(call: Call) -> tuple[object, float]:
    """Let the device's own clock run, from an idle device to the end of the last kernel."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    result = call()
    stop.record()
    stop.synchronize()
    return result, start.elapsed_time(stop) / 1e3


def time_in_turns(
    candidates: Mapping[Key, Call],
    repeats: int,
    budget: float = math.inf,
    device: torch.device = CPU,
    what: str = "timing",
) -> dict[Key, Timing]:
    """Time candidates in turns, as `read_in_turns` does.

    >>> timings = time_in_turns({"add": lambda: 1 + 1, "pass": lambda: None}, 5)
    >>> timings["add"].num_runs, timings["add"].low <= timings["add"].median
    (5, True)
    """
    calls = {key: (call, repeats) for key, call in candidates.items()}
    readings = read_in_turns(calls, 1, budget, device, what)
    return {key: sum_up(taken) for key, taken in readings.items()}


def read_in_turns(
    calls: Mapping[Key, tuple[Call, int]],
    per_turn: int,
    budget: float = math.inf,
    device: torch.device = CPU,
    what: str = "timing",
) -> dict[Key, list[Reading]]:
    """Read each call as often as it is to be made: a few times one, then a few times the next.

    A first call of each is thrown away. The order rotates, so that none always follows the same
    one. What used up its budget of seconds leaves after `MIN_RUNS` calls.
    """
    first = {key: read_once(call, device) for key, (call, _) in calls.items()}
    readings = {key: [each] if each.seconds >= LONG_RUN else [] for key, each in first.items()}
    keys = list(calls)
    num_turns = max(math.ceil(count / per_turn) for _, count in calls.values())
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()  # what is there now need not be looked at after every turn
    gc.disable()
    try:
        for turn in show_progress(range(num_turns), what):
            start = turn % len(keys)
            for key in keys[start:] + keys[:start]:
                (call, count), taken = calls[key], readings[key]
                if len(taken) < MIN_RUNS or sum(each.seconds for each in taken) < budget:
                    for _ in range(min(per_turn, count - len(taken))):
                        taken.append(read_once(call, device))
            gc.collect()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
    return readings


class Workload(NamedTuple):
    """A call on inputs that exist, the bytes of its outputs, and a call on a small problem."""

    call: Call
    output_bytes: int
    warm_up: Call
    device: torch.device


def peak_extra_bytes(make: Callable[..., Workload], *arguments: object) -> int:
    """Measure what a workload needs beyond its inputs and outputs, in a process of its own.

    A fresh process has no freed memory to hide in. Inputs are made and the libraries warmed up
    before the high-water mark of the resident set is set back, and read again after one call.
    """
    context, threads = multiprocessing.get_context("spawn"), torch.get_num_threads()
    with ProcessPoolExecutor(1, context, torch.set_num_threads, (threads,)) as fresh:
        try:
            return fresh.submit(_peak_extra_bytes_here, make, *arguments).result()
        except BrokenProcessPool as error:
            what = f"the process that measured the memory of {make.__name__} died"
            raise OSError(what) from error


def _peak_extra_bytes_here(make: Callable[..., Workload], *arguments: object) -> int:
    call, output_bytes, warm_up, device = make(*arguments)
    warm_up()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        peak = torch.cuda.max_memory_allocated(device)
    else:
        with suppress(AttributeError):  # not every C library has it
            ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = read_bytes("/proc/self/status", "VmRSS")
        result = call()
        peak = read_bytes("/proc/self/status", "VmHWM")
    del result
    return max(0, peak - before - output_bytes)


def read_bytes(path: str, name: str) -> int:
    """Read an entry of a file of /proc, which counts in kilobytes."""
    lines = Path(path).read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
