"""Compile kernels ahead of time, for devices that are not here: registers, spills, occupancy.

Compiling is not running: nothing here says how fast a kernel is.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import torch

from smat.bench.launches import (
    DTYPES,
    Case,
    backward_call,
    forward_call,
    launches_of,
    step_call,
)
from smat.extras import require
from smat.ops.triton.launch import Launch, precision_on

EVERYTHING: dict[str, Any] = {"gated": True, "routed": True, "group": 2, "window_step": 8192}
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


@dataclass(frozen=True)
class Device:
    """What a multiprocessor has, as its maker publishes it, and how Triton names the device.

    >>> DEVICES["sm_80"].blocks_at_once(num_warps=4, registers=128, shared=40_000)
    (4, 'registers, shared memory')
    """

    name: str
    target: tuple[str, int | str, int]  # backend, architecture, threads of a warp
    registers: int  # of a multiprocessor (of a SIMD on AMD), for one thread of each warp
    register_unit: int  # in which a thread's are handed out
    max_warps: int
    max_blocks: int
    shared: int  # bytes of a multiprocessor
    shared_of_block: int  # bytes that one block may have
    shared_kept: int = 0  # bytes of every block that the system keeps
    num_simds: int = 1

    def blocks_at_once(self, num_warps: int, registers: int, shared: int) -> tuple[int, str]:
        """Count the blocks that a multiprocessor holds at once, and name what limits them."""
        unit = self.register_unit
        warps = self.registers // (ceil(max(1, registers) / unit) * unit) * self.num_simds
        most = {
            "warps": self.max_warps // num_warps,
            "registers": min(warps, self.max_warps) // num_warps,
            "shared memory": self.shared // max(1, shared + self.shared_kept),
            "blocks": self.max_blocks,
        }
        fewest = min(most.values())
        return fewest, ", ".join(sorted(name for name, blocks in most.items() if blocks == fewest))


DEVICES = {
    device.name: device
    for device in (
        # The CUDA programming guide, table of technical specifications by compute capability.
        Device("sm_80", ("cuda", 80, 32), 2048, 8, 64, 32, 164 << 10, 163 << 10, 1 << 10),
        Device("sm_90", ("cuda", 90, 32), 2048, 8, 64, 32, 228 << 10, 227 << 10, 1 << 10),
        # AMD's CDNA 3 instruction set: 512 registers of a SIMD, 8 waves of it, 64 KB of a unit.
        Device("gfx942", ("hip", "gfx942", 64), 512, 8, 32, 32, 64 << 10, 64 << 10, num_simds=4),
    )
}  # fmt: skip


def compile_all(
    devices: Sequence[str], widths: Sequence[int], dtypes: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Compile every kernel of the op and of the step; the worst of each kernel's forms.

    Forms differ by what a call is given: gates, routing, heads that share keys.
    """
    for device, width, dtype in product(devices, widths, dtypes):
        forms: dict[str, list[dict[str, Any]]] = {}
        for launch in distinct_launches(width, dtype):
            row = compile_launch(launch, DEVICES[device], DTYPES[dtype])
            forms.setdefault(launch.name, []).append(row)
        for name, rows in forms.items():
            worst = min(rows, key=lambda row: row["occupancy"])
            most = {
                key: max(row[key] for row in rows)
                for key in ("registers", "spilled_bytes", "shared_bytes")
            }
            sizes = {"kernel": name, "width": width, "dtype": dtype}
            yield {"compiled_for": device, **sizes, "forms": len(rows), **worst, **most}


def distinct_launches(width: int, dtype: str) -> list[Launch]:
    """List one launch of every form of every kernel."""
    found: dict[tuple[str, str], Launch] = {}
    for case in (Case(width=width, dtype=dtype), Case(width=width, dtype=dtype, **EVERYTHING)):
        for prepare in (forward_call, backward_call, step_call):
            for launch in launches_of(prepare(case)):
                given = {name: _kind(x) for name, x in launch.arguments.items()}
                found.setdefault((launch.name, f"{given} {launch.meta}"), launch)
    return list(found.values())


def _kind(x: Any) -> str:
    return str(x.dtype) if isinstance(x, torch.Tensor) else str(x is None)


def compile_launch(launch: Launch, device: Device, dtype: torch.dtype) -> dict[str, Any]:
    """Compile a kernel as a launch would have it compiled, and read off what it needs."""
    if "PRECISION" in launch.meta:
        precision = precision_on(device.target[0], dtype)
        launch = launch._replace(meta={**launch.meta, "PRECISION": precision})
    compiler = require("triton.compiler", "gpu")
    targets = require("triton.backends.compiler", "gpu")
    target = targets.GPUTarget(*device.target)
    source, options = _source(launch, compiler.make_backend(target))
    done = compiler.compile(source, target=target, options=options)
    registers, spilled = (_amd_registers if device.num_simds > 1 else _nvidia_registers)(done)
    shared, num_warps = done.metadata.shared, done.metadata.num_warps
    blocks, limit = device.blocks_at_once(num_warps, registers, shared)
    return {
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": shared,
        "warps": num_warps,
        "blocks": blocks,
        "occupancy": blocks * num_warps / device.max_warps,
        "limit": limit,
    }


def _source(launch: Launch, backend: Any) -> tuple[Any, dict[str, Any]]:
    """Specialise a kernel on its arguments as a launch does; and what is no argument of it."""
    jit, compiler = require("triton.runtime.jit", "gpu"), require("triton.compiler", "gpu")
    kernel = launch.kernel
    bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {kernel.arg_names[0]: 0, **launch.arguments, **launch.meta}
    bound, specialization, others = bind(**given)
    _, signature, constants, attributes = kernel._pack_args(
        backend, dict(others), bound, specialization, others
    )
    return compiler.ASTSource(kernel, signature, constants, attributes), others


def _nvidia_registers(done: Any) -> tuple[int, int]:
    """Assemble once more, for the report that ptxas gives: registers, spilled bytes."""
    ptxas = require("triton.backends.nvidia.compiler", "gpu").get_ptxas(done.metadata.target.arch)
    target = re.search(r"\.target\s+(\w+)", done.asm["ptx"])
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(done.asm["ptx"])
        command = [ptxas.path, "-v", "--regAllocOptLevel=2", f"--gpu-name={target[1]}"]
        report = subprocess.run(
            [*command, str(source), "-o", str(Path(folder) / "kernel.cubin")],
            check=True, capture_output=True, text=True,
        ).stderr  # fmt: skip
    found, used = SPILLED.search(report), re.search(r"Used (\d+) registers", report)
    assert found is not None, report
    assert used is not None, report
    return int(used[1]), sum(int(each) for each in found.groups())


def _amd_registers(done: Any) -> tuple[int, int]:
    """Read the kernel's own description: vector registers, bytes of a thread that lie in memory.

    Scalars without a register are kept in lanes of a vector register, and cost no memory.
    """
    registers, spilled = (
        re.search(rf"\.{name}:\s+(\d+)", done.asm["amdgcn"])
        for name in ("vgpr_count", "private_segment_fixed_size")
    )
    assert registers is not None
    assert spilled is not None
    return int(registers[1]), int(spilled[1])
