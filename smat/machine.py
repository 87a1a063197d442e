"""Describe where a run happened and from which source, and live with what a machine gets wrong."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import signal
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path

import torch

PACKAGE = Path(__file__).parent
# Parameters of mallopt, by the names that its manual has.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
OF_A_CALL = 256 << 20, 31 << 20  # bytes that `keep_freed_memory` keeps, and the largest block
OF_TRAINING = (1 << 31) - 1, 1 << 30  # a process that trains asks for all of it at every step
CPUINFO = Path("/proc/cpuinfo")
# A product that is large enough to reach the instructions that some machines only pretend to have.
PROBE = "import torch; x = torch.ones(512, 512, dtype=torch.bfloat16); (x @ x).sum().item()"
ISA = "ONEDNN_MAX_CPU_ISA"
SAFE_ISA = "AVX512_CORE_FP16"  # all that oneDNN knows of without AMX
PATIENCE = 20  # seconds that a copy of this process may take for the probe

_log = logging.getLogger("smat")
_kept = 0  # bytes


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
def keep_freed_memory(num_bytes: int, largest_block: int) -> None:
    """Let malloc keep up to this many bytes that the process frees, in blocks up to the largest.

    >>> keep_freed_memory(*OF_A_CALL)

    glibc gives large blocks back to the system at once, and the top of its heap as soon as some
    megabytes of it are free; every temporary then pays for fresh pages, which cost more than the
    arithmetic on them (more than half of a step of multi-key recall). Of all that was asked for,
    the most counts. Other allocators, and users who set MALLOC_TRIM_THRESHOLD_, are left alone.
    """
    global _kept
    if num_bytes <= _kept:
        return
    _kept = num_bytes
    if platform.libc_ver()[0] == "glibc" and "MALLOC_TRIM_THRESHOLD_" not in os.environ:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, largest_block)
        libc.mallopt(M_TRIM_THRESHOLD, num_bytes)


def processor_name() -> str:
    """Name the processor as the system does."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def guard_bfloat16() -> None:
    """Keep bf16 products on a CPU from killing the process; the op and every layer call it.

    >>> guard_bfloat16()  # before the first product is best: a cheaper cure is left then

    Virtual machines may advertise AMX and hide what it needs, which ends in SIGILL. Where AMX is
    advertised, another process tries first, once; if it dies, oneDNN does without AMX here, or,
    if it has made its choice already, torch does without oneDNN. `ONEDNN_MAX_CPU_ISA`, if set, is
    left alone. A `RuntimeError` says that nothing helped.
    """
    _guard_once()


# What `torch.compiler.assume_constant_result` sets, whose import takes a second: compilers call
# the guard while they trace, instead of tracing it.
guard_bfloat16._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _guard_once() -> None:
    if ISA in os.environ or not CPUINFO.exists() or "amx_tile" not in CPUINFO.read_text():
        return
    if not subprocess.run([sys.executable, "-c", PROBE], capture_output=True).returncode:
        return
    os.environ[ISA] = SAFE_ISA
    if _survives_here():
        return
    was_enabled = torch.backends.mkldnn.set_flags(False)[0]
    if _survives_here():
        _log.warning("bf16 products die on this CPU with oneDNN, which is off now: %s", _advice())
        return
    torch.backends.mkldnn.set_flags(was_enabled)
    del os.environ[ISA]  # so that the next call says so again
    raise RuntimeError(f"bf16 products die on this CPU ({processor_name()}): {_advice()}")


def _advice() -> str:
    return f"set {ISA}={SAFE_ISA} before Python starts, or use float32, which is no slower there"


def _survives_here() -> bool:
    """Whether a copy of this process, with all that its libraries have settled, can multiply."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads of this process, which the copy does not need
        child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(PATIENCE)
            torch.set_num_threads(1)
            exec(PROBE, {})
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


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
