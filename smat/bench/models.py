"""Time whole models: a training step, prefill, one decoded token, memory and cache (Table 10)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from smat.bench import measure
from smat.bench.measure import Call, Timing
from smat.bench.model_configs import MODELS, YARDSTICK, ModelsConfig
from smat.models.routing_stream import RoutingStream, state_bytes

CHECK_LEN = 149
STEPS_PER_TURN = 16
NUM_TOKENS = 32  # different tokens that are fed in turn
LEARNING_RATE = 3e-3


def make_model(config: ModelsConfig, name: str, horizon: int) -> RoutingStream:
    """Build a model with weights of its own seed."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = config.model_dump(include={"width", "head_dim", "chunk_size"})
    return RoutingStream(horizon=horizon, **MODELS[name][1], **sizes).to(config.device)


def draw(config: ModelsConfig, *sizes: int) -> Tensor:
    """Draw hidden states: a step's time depends on shapes alone."""
    generator = torch.Generator(config.device).manual_seed(1)
    return torch.randn(*sizes, config.width, generator=generator, device=config.device)


def run_models(config: ModelsConfig) -> dict[str, Any]:
    """Check every model, time all that was asked for, and return the record."""
    device = measure.find_device(config.device)
    checks = [each for name in config.names for each in check_model(config, name)]
    record = measure.begin_record("models", config, device, checks)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for kind, lengths, bind in (
        ("train", config.train_lens, train_call),
        ("prefill", config.prefill_lens, prefill_call),
    ):
        for length in lengths:
            names = [
                name for name in config.names
                if name != "softmax" or length <= config.softmax_up_to
            ]  # fmt: skip
            x = draw(config, config.batch, length)
            bound = {name: bind(make_model(config, name, length), x) for name in names}
            calls = _that_fit(bound, kind, length, device, skipped)
            what = f"models: {kind} at {length}"
            timings = measure.time_in_turns(calls, config.repeats, config.budget, device, what)
            peaks = {
                name: measure.peak_extra_bytes(workload, config, name, kind, length)
                for name in measure.show_progress(calls, f"{what}, memory")
                if config.memory and length == max(lengths)
            }
            rows += _rows(kind, length, timings, peak_extra_bytes=peaks)
    timings, cache = time_decoding(config, device)
    rows += _rows("decode", config.context, timings, cache_bytes=cache)
    return {**record, "rows": rows, "skipped": skipped}


def train_call(model: RoutingStream, x: Tensor) -> Call:
    """One step: forward, backward, and the optimiser's update."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    def step() -> object:
        optimizer.zero_grad()
        loss = model(x)[0].square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def prefill_call(model: RoutingStream, x: Tensor) -> Call:
    """The forward pass, which leaves the state behind."""
    return torch.no_grad()(partial(model, x, keep_state=True))


def workload(config: ModelsConfig, name: str, kind: str, length: int) -> measure.Workload:
    """A model, its inputs made and touched, and what to run on them."""
    bind = train_call if kind == "train" else prefill_call
    model, x = make_model(config, name, length), draw(config, config.batch, length)
    few = bind(make_model(config, name, 256), draw(config, 1, 256))
    return measure.Workload(bind(model, x), 0, few, x.device)


@torch.no_grad()
def time_decoding(
    config: ModelsConfig, device: torch.device
) -> tuple[dict[str, Timing], dict[str, int]]:
    """Time a token after the context for all models in turns; their caches in bytes."""
    x = draw(config, config.batch, config.context)
    tokens = draw(config, NUM_TOKENS, config.batch)
    calls: dict[str, tuple[Call, int]] = {}
    cache: dict[str, int] = {}
    for name in measure.show_progress(config.names, "models: contexts"):
        model = make_model(config, name, config.context + config.steps + 1)
        state = model.state_after(x)
        cache[name] = state_bytes(state)
        calls[name] = _stepper(model, state, cycle(tokens)), config.steps
    what = f"models: decoding at {config.context}"
    with torch.no_grad():
        found = measure.read_in_turns(calls, STEPS_PER_TURN, config.budget, device, what)
    return {name: measure.sum_up(readings) for name, readings in found.items()}, cache


def _stepper(model: RoutingStream, state: Any, tokens: cycle[Tensor]) -> Call:
    def step() -> Tensor:
        nonlocal state
        out, state = model.step(next(tokens), state)
        return out

    return step


def check_model(config: ModelsConfig, name: str) -> list[dict[str, Any]]:
    """Hold a model to its full forward pass in fp64: output, gradients, prefill and decoding."""
    model, exact = (make_model(config, name, CHECK_LEN) for _ in range(2))
    exact, x = exact.double(), draw(config, 2, CHECK_LEN)
    oracle, found = _with_gradients(exact, x.double()), _with_gradients(model, x)
    size, split = f"T = {CHECK_LEN}", CHECK_LEN // 3
    checks = measure.check(name, size, found, oracle, "fp32")
    with torch.no_grad():
        begun, state = model(x[:, :split], keep_state=True)
        assert state is not None
        outputs = [begun]
        for token in x[:, split:].unbind(1):
            out, state = model.step(token, state)
            outputs.append(out.unsqueeze(1))
    decoded = {"output": torch.cat(outputs, 1)}
    return checks + measure.check(name, f"{size}, decoded from {split}", decoded, oracle, "fp32")


def _with_gradients(model: RoutingStream, x: Tensor) -> dict[str, Tensor]:
    """Run a model, and its backward pass to the weights that it uses."""
    out, _ = model(x)
    weights = {"qkv": model.qkv_proj.weight, "head": model.head.weight}
    grads = torch.autograd.grad(out.square().mean(), list(weights.values()))
    names = (f"gradient of {name}" for name in weights)
    return {"output": out, **dict(zip(names, grads, strict=True))}


def _that_fit(
    bound: Mapping[str, Call],
    kind: str,
    length: int,
    device: torch.device,
    skipped: list[dict[str, Any]],
) -> dict[str, Call]:
    """Leave out, and say so, what a GPU has no memory for; a CPU's system would swap."""
    if device.type != "cuda":
        return dict(bound)
    fitting = {}
    for name, call in bound.items():
        try:
            call()
        except torch.OutOfMemoryError as error:
            why = " ".join(str(error).split())[:80]
            skipped.append({"name": name, "pass": kind, "seq_len": length, "why": why})
        else:
            fitting[name] = call
    return fitting


def _rows(
    kind: str, length: int, timings: Mapping[str, Timing], **columns: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Set timings beside that of d = 1, with what else is known of each model."""
    return [
        {
            "name": name,
            "pass": kind,
            "seq_len": length,
            "timing": timing._asdict(),
            "ratio_to_d1": timing.ratio_to(timings[YARDSTICK]),
            **{column: values.get(name) for column, values in columns.items()},
        }
        for name, timing in timings.items()
    ]
