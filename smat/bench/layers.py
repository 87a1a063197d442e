"""Time the recurrent backbones beside transformers' torch paths, and what a learned memory adds.

Two questions. How fast are the recurrences themselves, on the same tensors, beside the plain-torch
functions of transformers? And how much more does a layer cost with a memory of distant tokens, with
learned routing and several reads a query, than without?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from smat.bench.checks import TOLERANCES, Check, relative_rms, require_passed
from smat.bench.environment import describe_environment
from smat.bench.layers_peers import MAMBA2, PEERS, load_peer
from smat.bench.timing import Candidate, NoProgress, Progress, Timing, measure, synchronizer
from smat.bench.workload import check_device
from smat.layers import GatedDeltaNet, Mamba2, ProfileMemory, TransportedMemory, kept_mask
from smat.masks import SMatMask, none
from smat.ops import smat_attention
from smat.ops.delta_rule import delta_rule
from smat.ops.delta_rule.reference import delta_rule_reference
from smat.ops.log_linear.reference import decay_reference

CHECK_LEN = 300
CHUNK = 64
Run = Callable[..., Tensor]


@dataclass(frozen=True)
class LayersConfig:
    """What to time: heads of one width, with one state of width x width each."""

    seq_len: int = 4096
    batch: int = 1
    heads: int = 4
    head_dim: int = 64
    num_groups: int = 1  # of heads that share B and C in Mamba-2: one, as in its models
    vc_dim: int = 3
    num_reads: int = 4
    repeats: int = 9
    budget: float = 60.0
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise ValueError(f"{name} must be 1 or more, but it is {value}")
        if self.heads % self.num_groups:
            raise ValueError(f"{self.heads} heads do not fall into {self.num_groups} groups")


@dataclass(frozen=True)
class LayersRow:
    """One candidate: seconds of a forward and backward pass, and times its baseline's."""

    name: str
    kind: str  # "operation" or "layer"
    timing: Timing
    baseline: str
    ratio: float  # to the baseline's median, timed in turns with it


def run_layers(config: LayersConfig, progress: Progress | None = None) -> dict[str, Any]:
    """Check every recurrence, time all, and return plain data."""
    progress = NoProgress() if progress is None else progress
    device = check_device(config.device, "fp32")
    peers = {name: load_peer(name) for name in PEERS}
    missing = [name for name, peer in peers.items() if peer is None]
    found = {name: peer for name, peer in peers.items() if peer is not None}
    checks = check_operations(config, found, device)
    require_passed(checks)
    operations = {**OURS, **found}
    groups = [
        ("operation", _operations(config, operations, device)),
        ("layer", _layers(config, device)),
    ]
    progress.expect(sum((config.repeats + 1) * len(each) for _, each in groups))
    rows: list[LayersRow] = []
    for kind, candidates in groups:
        timings = measure(
            {name: Candidate(run) for name, run in candidates.items()}, config.repeats,
            config.budget, progress, synchronizer(device),
        )  # fmt: skip
        for name, timing in timings.items():
            baseline = BASELINES.get(name, name)
            rows.append(LayersRow(name, kind, timing, baseline, timing.ratio_to(timings[baseline])))
    return {
        "benchmark": "layers",
        "environment": describe_environment(device),
        "config": asdict(config),
        "checks": [asdict(check) for check in checks],
        "rows": [asdict(row) for row in rows],
        "missing": missing,
    }


def our_scan(x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Mamba-2: S = exp(rate step) S + step b x', y = S' c."""
    mask = SMatMask(1, vc_dim=1, chunk_size=CHUNK, boundary=none())
    value, log_decay = x * step.unsqueeze(-1), rate * step
    options: dict[str, Any] = {"feature_map": "identity", "normalize": False, "branch": "causal"}
    return smat_attention(c, b, value, mask, log_decay=log_decay, **options)[0]


def our_delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
    """Gated DeltaNet: the gated delta rule."""
    return delta_rule(q, k, v, beta, log_decay, chunk_size=CHUNK)[0]


OURS: dict[str, Run] = {"Mamba-2": our_scan, "Gated DeltaNet": our_delta_rule}
BASELINES = {
    **{
        name: "Mamba-2" if source is MAMBA2 else "Gated DeltaNet"
        for name, (source, _) in PEERS.items()
    },
    "Mamba-2 + SMat layer": "Mamba-2 layer",
    "Gated DeltaNet + SMat layer": "Gated DeltaNet layer",
}


def draw_inputs(
    config: LayersConfig, length: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[Tensor, ...]]:
    """Draw what each recurrence takes: wide parts normal, gates as layers at their start have."""
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch, length, config.heads)

    def draw(*sizes: int, law: Callable[..., Tensor] = torch.randn) -> Tensor:
        return law(sizes, generator=generator, dtype=torch.float64)

    wide = (*shape, config.head_dim)
    x, v = (draw(*wide) for _ in range(2))
    b, c = (draw(*shape[:2], config.num_groups, config.head_dim) for _ in range(2))
    step, rate = 0.1 * draw(*shape, law=torch.rand), -1 - 15 * draw(config.heads, law=torch.rand)
    q, k = (torch.nn.functional.normalize(draw(*wide), dim=-1) for _ in range(2))
    drawn = {
        "Mamba-2": (x, step, rate, b, c),
        "Gated DeltaNet": (q, k, v, draw(*shape, law=torch.rand), rate * step),
    }
    return {
        name: tuple(each.to(device, dtype).requires_grad_() for each in tensors)
        for name, tensors in drawn.items()
    }


def check_operations(
    config: LayersConfig, peers: Mapping[str, Run], device: torch.device
) -> list[Check]:
    """Hold outputs and all gradients, ours and the peers', to the recurrence in fp64."""
    short = draw_inputs(config, CHECK_LEN, device)
    exact = draw_inputs(config, CHECK_LEN, device, torch.float64)

    def scan(x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> Tensor:
        b, c = (y.repeat_interleave(x.shape[2] // y.shape[2], 2) for y in (b, c))
        return decay_reference(c, b, x * step.unsqueeze(-1), rate * step)[0]

    oracles: dict[str, Run] = {
        "Mamba-2": scan, "Gated DeltaNet": lambda *given: delta_rule_reference(*given)[0],
    }  # fmt: skip
    checks = []
    for name, run in {**OURS, **peers}.items():
        which = BASELINES.get(name, name)
        found, expected = run(*short[which]), oracles[which](*exact[which])
        errors = {"output": relative_rms(found, expected)}
        grads = [
            torch.autograd.grad(out, given, _weight(out.shape, out))
            for out, given in ((found, short[which]), (expected, exact[which]))
        ]
        errors["gradients"] = max(relative_rms(*pair) for pair in zip(*grads, strict=True))
        for (quantity, error), limit in zip(errors.items(), TOLERANCES[torch.float32], strict=True):
            checks.append(Check(name, quantity, f"T = {CHECK_LEN}", error, limit))
    return checks


def _weight(shape: torch.Size, like: Tensor) -> Tensor:
    """Make the gradient that comes back: one that differs from number to number."""
    weight = torch.linspace(-1, 1, shape.numel(), dtype=torch.float64, device=like.device)
    return weight.view(shape).to(like.dtype)


def _operations(
    config: LayersConfig, operations: Mapping[str, Run], device: torch.device
) -> dict[str, Callable[[], object]]:
    inputs = draw_inputs(config, config.seq_len, device)

    def make(run: Run, given: tuple[Tensor, ...]) -> Callable[[], object]:
        weight = _weight(given[0].shape, given[0])
        return lambda: torch.autograd.grad(run(*given), given, weight)

    return {name: make(run, inputs[BASELINES.get(name, name)]) for name, run in operations.items()}


def _layers(config: LayersConfig, device: torch.device) -> dict[str, Callable[[], object]]:
    """Make each layer without and with a memory, of heads like those of the operations."""
    torch.manual_seed(0)
    hidden, heads, width = config.heads * config.head_dim // 2, config.heads, config.head_dim
    mask = kept_mask(config.seq_len, config.vc_dim, CHUNK)
    mamba: dict[str, Any] = {"state_dim": width, "head_dim": width, "expand": 2}
    mamba["num_groups"] = config.num_groups
    delta: dict[str, Any] = {"num_heads": heads, "head_dim": width, "expand_v": 1.0}
    reads: dict[str, Any] = {"num_reads": config.num_reads}
    layers: dict[str, torch.nn.Module] = {
        "Mamba-2 layer": Mamba2(hidden, **mamba),
        "Mamba-2 + SMat layer": Mamba2(
            hidden, **mamba, memory=ProfileMemory(hidden, heads, mask, **reads)
        ),
        "Gated DeltaNet layer": GatedDeltaNet(hidden, **delta),
        "Gated DeltaNet + SMat layer": GatedDeltaNet(
            hidden, **delta, memory=TransportedMemory(hidden, heads, mask, **reads)
        ),
    }
    x = torch.randn(config.batch, config.seq_len, hidden, device=device, requires_grad=True)

    def make(layer: torch.nn.Module) -> Callable[[], object]:
        leaves = (x, *(each for each in layer.parameters() if each.requires_grad))
        memory = getattr(layer, "memory", None)

        def run() -> object:
            out = layer(x)[0]
            loss = out.square().mean()
            if memory is not None:
                loss = loss + 0.01 * memory.balance_loss
            return torch.autograd.grad(loss, leaves, allow_unused=True)

        return run

    return {name: make(layer.to(device)) for name, layer in layers.items()}
