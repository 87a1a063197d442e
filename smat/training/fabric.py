"""Device, precision and strategy, through Lightning Fabric."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from smat.extras import require
from smat.machine import OF_TRAINING, guard_bfloat16, keep_freed_memory

if TYPE_CHECKING:
    from lightning.fabric import Fabric


PATIENCE = 50  # seconds with a process that says nothing


def make_fabric(
    device: str = "auto",
    precision: str = "32-true",
    *,
    strategy: str = "auto",
    num_devices: int = 1,
) -> Fabric:
    """Build and launch a Fabric on "auto", "cpu", "cuda" or one device such as "cuda:1".

    With "fsdp" or "tensor" every process has a Fabric of its own device, and `Trainer` shards the
    model, or deals its heads over them.
    """
    fabric = require("lightning.fabric", extra="train")
    kind, index = parse_device(device)
    if strategy in ("fsdp", "tensor"):
        strategy, index, num_devices = "auto", _join(kind), 1
    if kind == "cpu":
        keep_freed_memory(*OF_TRAINING)  # a step's temporaries are those of the step before
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


def _join(kind: str) -> int | None:
    """Join the group of all processes that torchrun has started; the index of the own device."""
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=PATIENCE))
    return int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" else None


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
