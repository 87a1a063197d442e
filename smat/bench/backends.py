"""Time the native backend beside the torch backend: forward, with the backward pass, a token."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import smat
from smat.bench import measure
from smat.bench.config import BackendsConfig
from smat.bench.measure import Call
from smat.ops.backend import available_backends

CHECK_LENGTH, TOKENS = 600, 32  # tokens that are decoded in a call
FORWARD, BACKWARD, DECODED = "forward", "with backward", f"{TOKENS} tokens decoded"
GATED = ", gated"
Inputs = dict[str, Tensor]


def run_backends(config: BackendsConfig) -> dict[str, Any]:
    """Check every backend at every d, then time them in turns; return the record."""
    device = measure.find_device(config.device, config.dtype)
    names = available_backends(device)
    checks = [
        each
        for vc_dim, gated in product(config.vc_dims, (False, True))
        for each in _check(config, vc_dim, gated, device)
    ]
    record = measure.begin_record("backends", config, device, checks)
    rows = []
    for seq_len, vc_dim, what in product(
        config.seq_lens, config.vc_dims, (FORWARD, BACKWARD, DECODED)
    ):
        calls: dict[tuple[str, bool], Call] = {}
        for gated in (False, True):
            inputs = _draw(config, seq_len, gated, device)
            horizon = seq_len + (TOKENS * (config.repeats + 1) if what == DECODED else 0)
            mask = smat.SMatMask(horizon, vc_dim, config.chunk_size)
            calls |= {(name, gated): _bind(what, name, inputs, mask) for name in names}
        shown = f"T = {seq_len}, d = {vc_dim}, {what}"
        timings = measure.time_in_turns(calls, config.repeats, config.budget, device, shown)
        for (name, gated), timing in timings.items():
            row = {"seq_len": seq_len, "vc_dim": vc_dim, "pass": what, "name": name + GATED * gated}
            plain = timing.ratio_to(timings[name, False]) if gated else None
            ratio = timings["torch", gated].ratio_to(timing)
            rows.append(
                {**row, "timing": timing._asdict(), "ratio": ratio, "ratio_to_plain": plain}
            )
    return {**record, "rows": rows}


def _check(
    config: BackendsConfig, vc_dim: int, gated: bool, device: torch.device
) -> list[dict[str, Any]]:
    """Hold gradients and decoded tokens of every backend against the oracle."""
    size = f"T = {CHECK_LENGTH}, d = {vc_dim}{GATED * gated}"
    inputs = _draw(config, CHECK_LENGTH, gated, device)
    mask, split = smat.SMatMask(CHECK_LENGTH, vc_dim, config.chunk_size), CHECK_LENGTH - TOKENS
    exact = {name: x.double().requires_grad_() for name, x in inputs.items()}
    oracle = measure.forward_backward(smat.reference_attention, exact, mask=mask)
    last = {"output": oracle["output"][:, split:]}
    checks = []
    for name in available_backends(device):
        found = _bind(BACKWARD, name, inputs, mask)()
        checks += measure.check(name, size, found, oracle, config.dtype)  # type: ignore[arg-type]
        prompt, rest = ({each: x[:, part] for each, x in inputs.items()}
                        for part in (slice(split), slice(split, None)))  # fmt: skip
        tokens = {"output": _decode(_prefill(name, prompt, mask), rest, name)}
        checks += measure.check(name, f"{size}, decoded", tokens, last, config.dtype)
    return checks


def _draw(config: BackendsConfig, seq_len: int, gated: bool, device: torch.device) -> Inputs:
    shape, dtype = (1, seq_len, config.heads), measure.DTYPES[config.dtype]
    widths = {"q": config.key_dim, "k": config.key_dim, "v": config.value_dim}
    widths["grad_out"] = config.value_dim
    inputs = {
        name: torch.randn(*shape, width, device=device, dtype=dtype)
        for name, width in widths.items()
    }
    if gated:
        inputs["log_decay"] = -0.1 * torch.rand(shape, device=device, dtype=dtype)
    return inputs


def _bind(what: str, name: str, inputs: Inputs, mask: smat.SMatMask) -> Call:
    if what == DECODED:
        state, some = (
            _prefill(name, inputs, mask),
            {each: x[:, :TOKENS] for each, x in inputs.items()},
        )
        return partial(_decode, state, some, name)
    given = {each: x for each, x in inputs.items() if each != "grad_out"}
    if what == BACKWARD:
        given = {each: x.detach().requires_grad_() for each, x in given.items()}
        given["grad_out"] = inputs["grad_out"]
    return partial(measure.forward_backward, smat.smat_attention, given, mask=mask, backend=name)


def _prefill(name: str, inputs: Inputs, mask: smat.SMatMask) -> smat.SMatState:
    q, k, v = (inputs[each] for each in "qkv")
    _, state = smat.smat_attention(
        q, k, v, mask, log_decay=inputs.get("log_decay"), backend=name, output_final_state=True,
        positions=torch.tensor([q.shape[1] - 1], device=q.device),
    )  # fmt: skip
    assert state is not None
    return state


def _decode(state: smat.SMatState, inputs: Inputs, name: str) -> Tensor:
    """Decode some tokens, in place; return their outputs (B, T, H, V)."""
    given = {each: x.unbind(1) for each, x in inputs.items() if each != "grad_out"}
    outs = []
    for q, k, v, *gate in zip(*given.values(), strict=True):
        log_decay = gate[0] if gate else None
        out, state = state.step(q, k, v, log_decay=log_decay, inplace=True, backend=name)
        outs.append(out)
    return torch.stack(outs, 1)
