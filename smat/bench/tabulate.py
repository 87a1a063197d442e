"""Time the three ways to tabulate: factored, Algorithm 2, and the dense product."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smat.bench import measure
from smat.bench.config import TabulateConfig
from smat.geometry import Geometry, radon

CHECK_COLUMNS = 3


def run_tabulate(config: TabulateConfig) -> dict[str, Any]:
    """Check every form at every geometry, then time and measure; return the record."""
    device = measure.find_device(config.device)
    geometries = [Geometry(vc_dim=d, field_size=q) for q, d in config.cases]
    checks = [
        each
        for geometry in geometries
        for method in _methods(geometry, config)
        for each in _check(geometry, method, device)
    ]
    record = measure.begin_record("tabulate", config, device, checks)
    rows = [row for geometry in geometries for row in _rows(geometry, config, device)]
    return {**record, "rows": rows}


def tabulate_by(
    method: str, geometry: Geometry, device: torch.device
) -> tuple[Callable[[Tensor, Tensor], object], int]:
    """Prepare one form: a function of table and out, and the bytes of what it keeps prepared.

    The dense product is a plain GEMM with an incidence matrix that is already fp32, and every form
    writes into memory that exists: each is timed at its best.
    """
    shape = geometry.field_size, geometry.ambient_dim
    if method == "dense":
        incidence = geometry.incidence(device).float()
        return lambda table, out: torch.matmul(incidence, table, out=out), incidence.nbytes
    list_steps = radon.tabulation_steps if method == "factored" else radon.incident_points
    num_bytes = sum(index.nbytes for step in list_steps(*shape, device) for index in step)
    if method == "factored":
        return lambda table, out: radon.tabulate_tables(table, *shape, out=out), num_bytes
    return lambda table, out: out.copy_(geometry.tabulate(table, method)), num_bytes


def tabulate_workload(
    geometry: Geometry, method: str, num_columns: int, device: torch.device
) -> measure.Workload:
    """Everything that one tabulation needs, made and touched; it writes into memory that exists."""
    transform, _ = tabulate_by(method, geometry, device)
    wide, narrow = (_tables(geometry, columns, device) for columns in (num_columns, 1))
    return measure.Workload(partial(transform, *wide), 0, partial(transform, *narrow), device)


def _rows(geometry: Geometry, config: TabulateConfig, device: torch.device) -> list[dict[str, Any]]:
    """Time the forms at one geometry."""
    tables = _tables(geometry, config.num_columns, device)
    forms = {method: tabulate_by(method, geometry, device) for method in _methods(geometry, config)}
    calls = {method: partial(transform, *tables) for method, (transform, _) in forms.items()}
    what = f"tabulate, q = {geometry.field_size}, d = {geometry.vc_dim}"
    timings = measure.time_in_turns(calls, config.repeats, config.budget, device, what)
    working = {
        method: measure.peak_extra_bytes(
            tabulate_workload, geometry, method, config.num_columns, device
        )
        for method in (forms if config.memory else ())
    }
    return [
        {
            "field_size": geometry.field_size,
            "vc_dim": geometry.vc_dim,
            "num_profiles": geometry.num_profiles,
            "num_types": geometry.num_types,
            "method": method,
            "additions": geometry.tabulation_cost(method),
            "timing": timing._asdict(),
            "ratio_to_factored": timing.ratio_to(timings["factored"]),
            "kept_bytes": forms[method][1],
            "working_bytes": working.get(method),
        }
        for method, timing in timings.items()
    ]


def _methods(geometry: Geometry, config: TabulateConfig) -> list[str]:
    """The forms to time; the dense one only where its matrix fits."""
    dense_fits = 4 * geometry.num_types * geometry.num_profiles <= config.dense_limit * 1e6
    return [method for method in radon.METHODS if dense_fits or method != "dense"]


def _check(geometry: Geometry, method: str, device: torch.device) -> list[dict[str, Any]]:
    """Compare with sums in fp64 that visit every point of every hyperplane one by one."""
    table, out = _tables(geometry, CHECK_COLUMNS, device)
    tabulate_by(method, geometry, device)[0](table, out)
    exact = out[0].double().zero_()
    profile = torch.arange(geometry.num_profiles, device=device)
    for direction in range(max(1, geometry.num_directions)):
        index = torch.full_like(profile, direction)
        types = geometry.type_index(index, geometry.offset_of(index, profile))
        exact.index_add_(0, types, table[0].double())
    name = f"q={geometry.field_size}, d={geometry.vc_dim}, {method}"
    found, oracle = {"type table": out[0]}, {"type table": exact}
    return measure.check(name, f"{CHECK_COLUMNS} columns", found, oracle, "fp32")


def _tables(geometry: Geometry, num_columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    table = torch.rand(1, geometry.num_profiles, num_columns, device=device)
    return table, torch.ones(1, geometry.num_types, num_columns, device=device)
