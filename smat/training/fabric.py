"""Device, precision and strategy, through Lightning Fabric."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from smat.extras import require
from smat.ops.smat.operator import keep_freed_pages

if TYPE_CHECKING:
    from lightning.fabric import Fabric

# What oneDNN may use where the processor claims AMX and dies in it.
SAFE_ISA = "AVX512_CORE_FP16"
PROBE = "import torch; x = torch.ones(512, 512, dtype=torch.bfloat16); (x @ x).sum().item()"
CPUINFO = Path("/proc/cpuinfo")


def make_fabric(
    device: str = "auto",
    precision: str = "32-true",
    *,
    strategy: str = "auto",
    num_devices: int = 1,
) -> Fabric:
    """Build and launch a Fabric on "auto", "cpu", "cuda" or one device such as "cuda:1"."""
    fabric = require("lightning.fabric", extra="train")
    kind, index = parse_device(device)
    if kind == "cpu":
        keep_freed_pages()  # a step's temporaries are those of the step before
        if precision.startswith("bf16"):
            guard_bfloat16()
    for name in (
        "lightning",
        "lightning.fabric",
        "lightning.pytorch",
    ):  # it tells at length what was asked for
        logging.getLogger(name).setLevel(logging.WARNING)
    devices = num_devices if index is None else [index]
    made = fabric.Fabric(accelerator=kind, devices=devices, precision=precision, strategy=strategy)
    made.launch()
    return made


def parse_device(device: str) -> tuple[str, int | None]:
    """Return a device's kind and index, or say that there is no such device.

    >>> parse_device("cpu")
    ('cpu', None)
    """
    kind, _, index = device.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    is_there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if kind not in ("cpu", *is_there) or (index and not (kind == "cuda" and index.isdigit())):
        raise ValueError(f"device is auto, cpu, cuda, cuda:N or mps, not {device!r}")
    if not is_there.get(kind, True):
        raise ValueError(f"device {device} was asked for, but torch sees no GPU; use cpu or auto")
    return kind, int(index) if index else None


def guard_bfloat16() -> None:
    """Keep bf16 products on a CPU from killing the process; call it before the first product.

    Virtual machines may advertise AMX and hide what it needs, which ends in SIGILL. Where AMX is
    advertised, another process tries first, and if it dies, oneDNN does without AMX here.
    ONEDNN_MAX_CPU_ISA, if set, is left alone.
    """
    has_amx = CPUINFO.exists() and "amx_tile" in CPUINFO.read_text()
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not has_amx:
        return
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, check=False)
    if done.returncode:
        os.environ["ONEDNN_MAX_CPU_ISA"] = SAFE_ISA
