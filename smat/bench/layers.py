"""Time the recurrent backbones beside transformers' torch paths, and what a learned memory adds."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smat.bench import measure
from smat.bench.config import LayersConfig
from smat.bench.measure import Call, forward_backward
from smat.layers import GatedDeltaNet, Mamba2, ProfileMemory, TransportedMemory, kept_mask
from smat.masks import SMatMask, none
from smat.ops import smat_attention
from smat.ops.delta_rule import delta_rule
from smat.ops.delta_rule.reference import delta_rule_reference
from smat.ops.log_linear.reference import decay_reference

CHECK_LEN = 300
CHUNK = 64
Recurrence = Callable[..., Any]  # gives an output, or a tuple that begins with it


def scan(x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba-2: S = exp(rate step) S + step b x', y = S' c."""
    mask = SMatMask(1, vc_dim=1, chunk_size=CHUNK, boundary=none())
    value, log_decay = x * step.unsqueeze(-1), rate * step
    options: dict[str, Any] = {"feature_map": "identity", "normalize": False, "branch": "causal"}
    return smat_attention(c, b, value, mask, log_decay=log_decay, **options)[0]


def exact_scan(x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The same, token by token."""
    b, c = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (b, c))
    return decay_reference(c, b, x * step.unsqueeze(-1), rate * step)[0]


class Peer(NamedTuple):
    """A function of transformers, and which of our recurrences it stands beside."""

    beside: str
    module: str
    function: str
    chunk: int


MAMBA2, DELTANET = "Mamba-2", "Gated DeltaNet"
OURS: dict[str, Recurrence] = {MAMBA2: scan, DELTANET: partial(delta_rule, chunk_size=CHUNK)}
ORACLES: dict[str, Recurrence] = {MAMBA2: exact_scan, DELTANET: delta_rule_reference}
THEIR_SCAN = "transformers.models.mamba2.modeling_mamba2", "mamba2_chunk_scan"
THEIR_RULE = "transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"
PEERS = {  # with their own default of a chunk first
    f"transformers {peer.function}, chunk {peer.chunk}": peer
    for peer in (
        Peer(MAMBA2, *THEIR_SCAN, 256),
        Peer(MAMBA2, *THEIR_SCAN, 64),
        Peer(DELTANET, *THEIR_RULE, 64),
    )
}
BASELINES = {name: peer.beside for name, peer in PEERS.items()}
BASELINES |= {f"{name} + SMat layer": f"{name} layer" for name in OURS}


def load_peer(peer: Peer) -> Recurrence | None:
    """Import a peer, without the wrapper that would look for a kernel; None if it is not there."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function = inspect.unwrap(getattr(import_module(peer.module), peer.function))
    except (ImportError, AttributeError):
        return None
    if peer.beside == MAMBA2:
        return lambda **given: function(*given.values(), peer.chunk)
    return lambda q, k, v, beta, log_decay: function(q, k, v, log_decay, beta, peer.chunk)


def run_layers(config: LayersConfig) -> dict[str, Any]:
    """Check every recurrence, time all, and return the record."""
    device = measure.find_device(config.device)
    peers = {name: load_peer(peer) for name, peer in PEERS.items()}
    operations = {**OURS, **{name: peer for name, peer in peers.items() if peer is not None}}
    checks = [each for name, run in operations.items() for each in _check(config, name, run)]
    record = measure.begin_record("layers", config, device, checks)
    inputs = draw_inputs(config, config.seq_len)
    on_inputs: dict[str, Call] = {
        name: partial(forward_backward, run, inputs[BASELINES.get(name, name)])
        for name, run in operations.items()
    }
    rows = []
    for kind, calls in {"operation": on_inputs, "layer": _layers(config, device)}.items():
        what = f"layers: {kind}s"
        timings = measure.time_in_turns(calls, config.repeats, config.budget, device, what)
        for name, timing in timings.items():
            baseline = BASELINES.get(name, name)
            row = {"name": name, "kind": kind, "timing": timing._asdict(), "baseline": baseline}
            rows.append({**row, "ratio": timing.ratio_to(timings[baseline])})
    missing = [name for name, peer in peers.items() if peer is None]
    return {**record, "rows": rows, "missing": missing}


def draw_inputs(
    config: LayersConfig, length: int, dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, Tensor]]:
    """Draw what each recurrence takes: wide parts normal, gates as layers at their start have."""
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch, length, config.heads)
    wide, grouped = (*shape, config.head_dim), (*shape[:2], config.num_groups, config.head_dim)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    def uniform(*sizes: int) -> Tensor:
        return torch.rand(sizes, generator=generator, dtype=torch.float64)

    x, v, b, c = normal(*wide), normal(*wide), normal(*grouped), normal(*grouped)
    step, rate = 0.1 * uniform(*shape), -1 - 15 * uniform(config.heads)
    q, k = (torch.nn.functional.normalize(normal(*wide), dim=-1) for _ in range(2))
    gates = {"beta": uniform(*shape), "log_decay": rate * step}
    grad_out = normal(*wide)
    inputs = {
        MAMBA2: {"x": x, "step": step, "rate": rate, "b": b, "c": c, "grad_out": grad_out},
        DELTANET: {"q": q, "k": k, "v": v, **gates, "grad_out": grad_out},
    }
    return {
        name: {each: x.to(config.device, dtype).requires_grad_() for each, x in tensors.items()}
        for name, tensors in inputs.items()
    }


def _check(config: LayersConfig, name: str, run: Recurrence) -> list[dict[str, Any]]:
    """Hold the output and all gradients of a recurrence, ours or a peer's, to the one in fp64."""
    which = BASELINES.get(name, name)
    found = forward_backward(run, draw_inputs(config, CHECK_LEN)[which])
    exact = draw_inputs(config, CHECK_LEN, torch.float64)[which]
    oracle = forward_backward(ORACLES[which], exact)
    return measure.check(name, f"T = {CHECK_LEN}", found, oracle, "fp32")


def _layers(config: LayersConfig, device: torch.device) -> dict[str, Call]:
    """Make each layer without and with a memory, of heads like those of the operations."""
    torch.manual_seed(0)
    hidden, heads, width = config.heads * config.head_dim // 2, config.heads, config.head_dim
    mask = kept_mask(config.seq_len, config.vc_dim, CHUNK)
    mamba2 = partial(
        Mamba2, hidden, state_dim=width, head_dim=width, expand=2, num_groups=config.num_groups
    )
    deltanet = partial(GatedDeltaNet, hidden, num_heads=heads, head_dim=width, expand_v=1.0)
    profiles = ProfileMemory(hidden, heads, mask, num_reads=config.num_reads, settings="paper")
    transported = TransportedMemory(
        hidden, heads, mask, num_reads=config.num_reads, settings="paper"
    )
    layers: dict[str, Mamba2 | GatedDeltaNet] = {
        "Mamba-2 layer": mamba2(),
        "Mamba-2 + SMat layer": mamba2(memory=profiles),
        "Gated DeltaNet layer": deltanet(),
        "Gated DeltaNet + SMat layer": deltanet(memory=transported),
    }
    x = torch.randn(config.batch, config.seq_len, hidden, device=device, requires_grad=True)

    def step(layer: Mamba2 | GatedDeltaNet) -> object:
        loss = layer(x)[0].square().mean()
        memory: Any = layer.memory
        if memory is not None:
            loss = loss + 0.01 * memory.balance_loss
        leaves = (x, *(each for each in layer.parameters() if each.requires_grad))
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    return {name: partial(step, layer.to(device)) for name, layer in layers.items()}
