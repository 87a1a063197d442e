"""Time the native backend beside the torch backend, forward and with the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import smat
from smat.bench import measure
from smat.bench.config import BackendsConfig
from smat.ops.backend import available_backends

CHECK_LENGTH = 600


def run_backends(config: BackendsConfig) -> dict[str, Any]:
    """Check every backend at every d, then time them in turns; return the record."""
    device = measure.find_device(config.device, config.dtype)
    names = available_backends(device)
    cases = [(d, gated) for d in config.vc_dims for gated in (False, True)]
    checks = []
    for vc_dim, gated in cases:
        size = f"T = {CHECK_LENGTH}, d = {vc_dim}" + ", gated" * gated
        inputs, mask = _draw(config, CHECK_LENGTH, vc_dim, gated, device)
        exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
        oracle = measure.forward_backward(smat.reference_attention, exact, mask=mask)
        for name in names:
            checks += measure.check(name, size, _bind(name, inputs, mask)(), oracle, config.dtype)
    record = measure.begin_record("backends", config, device, checks)
    rows = []
    for seq_len in config.seq_lens:
        for vc_dim, gated in cases:
            inputs, mask = _draw(config, seq_len, vc_dim, gated, device)
            calls = {name: _bind(name, inputs, mask) for name in names}
            what = f"T = {seq_len}, d = {vc_dim}"
            timings = measure.time_in_turns(calls, config.repeats, config.budget, device, what)
            rows += [
                {"seq_len": seq_len, "vc_dim": vc_dim, "name": name + ", gated" * gated,
                 "timing": timing._asdict(), "ratio": timings["torch"].ratio_to(timing)}
                for name, timing in timings.items()
            ]  # fmt: skip
    return {**record, "rows": rows}


def _draw(
    config: BackendsConfig, seq_len: int, vc_dim: int, gated: bool, device: torch.device
) -> tuple[dict[str, Tensor], smat.SMatMask]:
    shape, dtype = (1, seq_len, config.heads), measure.DTYPES[config.dtype]
    widths = {"q": config.key_dim, "k": config.key_dim, "v": config.value_dim}
    inputs = {
        name: torch.randn(*shape, width, device=device, dtype=dtype)
        for name, width in widths.items()
    }
    if gated:
        inputs["log_decay"] = -0.1 * torch.rand(shape, device=device, dtype=dtype)
    if config.both:
        inputs = {name: x.requires_grad_() for name, x in inputs.items()}
        inputs["grad_out"] = torch.randn(*shape, config.value_dim, device=device, dtype=dtype)
    return inputs, smat.SMatMask(seq_len, vc_dim, config.chunk_size)


def _bind(name: str, inputs: dict[str, Tensor], mask: smat.SMatMask) -> Callable[[], Any]:
    return partial(measure.forward_backward, smat.smat_attention, inputs, mask=mask, backend=name)
