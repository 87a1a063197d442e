"""Time the three ways to tabulate: factored, Algorithm 2, and the dense product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from smat.bench.checks import TOLERANCES, Check, relative_rms, require_passed
from smat.bench.environment import describe_environment
from smat.bench.memory import Workload, peak_extra_bytes
from smat.bench.timing import Candidate, NoProgress, Progress, Timing, measure, synchronizer
from smat.geometry import Geometry, hyperplanes, radon

CHECK_COLUMNS = 3
DEFAULT_CASES = ((37, 3), (53, 3), (11, 4), (17, 4), (23, 4), (7, 5), (11, 5))


@dataclass(frozen=True)
class TabulateConfig:
    """Which geometries (q, d) to tabulate, and how often."""

    cases: tuple[tuple[int, int], ...] = DEFAULT_CASES
    num_columns: int = 2080
    repeats: int = 5
    budget: float = 30.0
    dense_limit: int = 700_000_000  # bytes of an incidence matrix above which it is left out
    memory: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.num_columns < 1 or self.repeats < 1:
            raise ValueError(
                f"columns and repeats must be 1 or more, "
                f"but they are {self.num_columns} and {self.repeats}"
            )

    def methods(self, geometry: Geometry) -> list[str]:
        """The forms to time; the dense one only where its matrix fits."""
        incidence_bytes = 4 * geometry.num_types * geometry.num_profiles
        return [
            method
            for method in radon.METHODS
            if method != "dense" or incidence_bytes <= self.dense_limit
        ]


@dataclass(frozen=True)
class TabulateRow:
    """One form at one geometry; seconds, and bytes beyond input and output."""

    field_size: int
    vc_dim: int
    num_profiles: int
    num_types: int
    method: str
    additions: int
    timing: Timing
    ratio_to_factored: float
    kept_bytes: int  # index tables or the incidence matrix, counted
    working_bytes: int | None  # peak while running, measured


def run_tabulate(config: TabulateConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Check every form at every geometry, then time and measure; return plain data."""
    progress = NoProgress() if progress is None else progress
    device = torch.device(config.device)
    geometries = [Geometry(vc_dim=d, field_size=q) for q, d in config.cases]
    for geometry in geometries:
        units = sum(_weight(geometry, method) for method in config.methods(geometry))
        progress.expect(units * (config.repeats + 1))
    environment = describe_environment(device)
    checks, rows = [], []
    for geometry in geometries:
        checks += [_check(geometry, method, device) for method in config.methods(geometry)]
    require_passed(checks)
    for geometry in geometries:
        rows += _time(geometry, config, device, progress)
    return {
        "benchmark": "tabulate",
        "environment": environment,
        "config": asdict(config),
        "checks": [asdict(check) for check in checks],
        "rows": [asdict(row) for row in rows],
    }


def tabulate_by(
    method: str, geometry: Geometry, device: torch.device
) -> tuple[Callable[[Tensor, Tensor], object], int]:
    """Prepare one form: a function of table and out, and the bytes of what it keeps prepared.

    The dense product is a plain GEMM with an incidence matrix that is already fp32, and every form
    writes into memory that exists: each is timed at its best.
    """
    q, ambient_dim = geometry.field_size, geometry.ambient_dim
    if method == "dense":
        incidence = hyperplanes.incidence(q, ambient_dim, device).float()
        kept = incidence.numel() * incidence.element_size()
        return lambda table, out: torch.matmul(incidence, table, out=out), kept
    kept = _index_bytes(method, geometry, device)
    if method == "algorithm2":
        return lambda table, out: out.copy_(geometry.tabulate(table, method)), kept
    return lambda table, out: radon.tabulate_tables(table, q, ambient_dim, out=out), kept


def tabulate_workload(
    field_size: int, vc_dim: int, method: str, num_columns: int, device: str
) -> Workload:
    """Everything that one tabulation needs, made and touched."""
    place, geometry = torch.device(device), Geometry(vc_dim=vc_dim, field_size=field_size)
    transform, _ = tabulate_by(method, geometry, place)
    table, out = _tables(geometry, num_columns, place)
    narrow = [table[..., :1].contiguous(), out[..., :1].contiguous()]
    return Workload(
        run=lambda: transform(table, out),
        output_bytes=0,  # written into memory that exists
        warm=lambda: transform(*narrow),
        device=place,
    )


def _time(
    geometry: Geometry, config: TabulateConfig, device: torch.device, progress: Progress
) -> list[TabulateRow]:
    table, out = _tables(geometry, config.num_columns, device)
    prepared = {
        method: tabulate_by(method, geometry, device) for method in config.methods(geometry)
    }

    def candidate(method: str) -> Candidate:
        transform, _ = prepared[method]
        return Candidate(lambda: transform(table, out), _weight(geometry, method))

    candidates = {method: candidate(method) for method in prepared}
    timings = measure(candidates, config.repeats, config.budget, progress, synchronizer(device))
    return [
        TabulateRow(
            geometry.field_size, geometry.vc_dim, geometry.num_profiles, geometry.num_types,
            method, geometry.tabulation_cost(method),
            timing=timings[method],
            ratio_to_factored=timings[method].ratio_to(timings["factored"]),
            kept_bytes=prepared[method][1],
            working_bytes=_working_bytes(geometry, method, config),
        )
        for method in prepared
    ]  # fmt: skip


def _working_bytes(geometry: Geometry, method: str, config: TabulateConfig) -> int | None:
    if not config.memory:
        return None
    arguments = {
        "field_size": geometry.field_size, "vc_dim": geometry.vc_dim, "method": method,
        "num_columns": config.num_columns, "device": config.device,
    }  # fmt: skip
    return peak_extra_bytes(f"{__name__}:tabulate_workload", arguments)


def _check(geometry: Geometry, method: str, device: torch.device) -> Check:
    """Compare with sums in fp64 that visit every point of every hyperplane one by one."""
    table = torch.rand(geometry.num_profiles, CHECK_COLUMNS, device=device)
    transform, _ = tabulate_by(method, geometry, device)
    out = torch.empty(1, geometry.num_types, CHECK_COLUMNS, device=device)
    transform(table.unsqueeze(0), out)
    return Check(
        name=f"q={geometry.field_size}, d={geometry.vc_dim}, {method}",
        quantity="type table",
        size=f"{CHECK_COLUMNS} columns",
        error=relative_rms(out[0], _sum_point_by_point(geometry, table.double())),
        tolerance=TOLERANCES[torch.float32][0],
    )


def _sum_point_by_point(geometry: Geometry, table: Tensor) -> Tensor:
    out = table.new_zeros(geometry.num_types, table.shape[-1])
    profile = torch.arange(geometry.num_profiles, device=table.device)
    for direction in range(max(1, geometry.num_directions)):
        index = torch.full_like(profile, direction)
        offset = geometry.offset_of(index, profile)
        out.index_add_(0, geometry.type_index(index, offset), table)
    return out


def _tables(geometry: Geometry, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    table = torch.rand(1, geometry.num_profiles, num_columns, device=device)
    return table, torch.zeros(1, geometry.num_types, num_columns, device=device).fill_(1)


def _index_bytes(method: str, geometry: Geometry, device: torch.device) -> int:
    """Count the integer tables that a form keeps for a geometry."""
    q, ambient_dim = geometry.field_size, geometry.ambient_dim
    list_steps = radon.incident_points if method == "algorithm2" else radon.tabulation_steps
    tables = [table for step in list_steps(q, ambient_dim, device) for table in step]
    return sum(index.numel() * index.element_size() for index in tables)


def _weight(geometry: Geometry, method: str) -> float:
    """Expected cost, for the time left: a GEMM does about ten additions while others do one."""
    return geometry.tabulation_cost(method) * (0.1 if method == "dense" else 1.0)
