"""What the Triton kernels need on a GPU and what they move, without a GPU."""

from __future__ import annotations

from typing import Any

from smat.bench.bytes_moved import count_all
from smat.bench.compiled import compile_all
from smat.bench.config import KernelsConfig
from smat.bench.measure import show_progress
from smat.extras import require


def run_kernels(config: KernelsConfig) -> dict[str, Any]:
    """Compile all kernels and count their bytes; return the record."""
    triton = require("triton", "gpu")
    compiled = (
        list(show_progress(compile_all(config.devices, config.widths, config.dtypes), "compiling"))
        if config.compiled
        else []
    )
    moved = (
        list(count_all(config.vc_dims, config.seq_len, 64, config.dtypes)) if config.counted else []
    )
    versions = {"triton": triton.__version__}
    given = {"benchmark": "kernels", "environment": versions, "config": config.record()}
    return {**given, "compiled": compiled, "bytes": moved}
