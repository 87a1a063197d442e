"""Describe where a benchmark ran, so that its numbers can be judged later."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from typing import Any

import torch

import smat
from smat.machine import processor_name, source_commit


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Collect machine, versions, commit, load and threads as plain data."""
    return {
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
        "smat": smat.__version__,
        "commit": source_commit(),
    }
