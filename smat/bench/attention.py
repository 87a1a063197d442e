"""Time the op, forward (prefill) or forward and backward (train), beside softmax and d = 1."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from statistics import linear_regression
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import smat
from smat.bench import measure
from smat.bench.config import HeadsConfig, PrefillConfig
from smat.bench.measure import DTYPES, Call, Timing, forward_backward
from smat.bench.peers import CHECK_LEN, Peer, willing_peers
from smat.masks.boundary import none, window

SOFTMAX, GEMM, CAUSAL = "softmax", "gemm", "causal branch"
TILE = 64  # tokens of a chunk, for which the operations of the causal branch are counted
Inputs = dict[str, Tensor]  # q, k, v; log_decay where there are gates; grad_out with a backward
Key = tuple[int, str, int]  # of a timing: length, name, heads


@dataclass(frozen=True)
class Variant:
    """One way to run the op: VC dimension, gates, and the boundary's schedule; softmax without d.

    >>> Variant(3, gated=True, window_step=2048).name
    'd=3 gated window(2048)'
    """

    vc_dim: int | None
    gated: bool = False
    window_step: int | None = None

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        moves = "" if self.window_step is None else f" window({self.window_step})"
        return f"d={self.vc_dim}{' gated' * self.gated}{moves}" if self.vc_dim else SOFTMAX

    def mask(self, seq_len: int, chunk_size: int) -> smat.SMatMask:
        """Build the mask; whether VC = d is guaranteed makes no difference to its cost."""
        assert self.vc_dim is not None
        boundary = None if self.window_step is None else window(self.window_step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", smat.SMatWarning)
            return smat.SMatMask(seq_len, self.vc_dim, chunk_size, boundary=boundary)

    def take(self, inputs: Inputs) -> Inputs:
        """Leave the gates out if the variant has none."""
        return {name: x for name, x in inputs.items() if self.gated or name != "log_decay"}

    def bind(self, inputs: Inputs, chunk_size: int) -> Callable[[], dict[str, Tensor]]:
        """Prepare a call on inputs; softmax gets its own with heads first, as its kernels want."""
        if self.vc_dim is not None:
            mask = self.mask(inputs["q"].shape[1], chunk_size)
            return partial(forward_backward, smat.smat_attention, self.take(inputs), mask=mask)
        heads_first = {
            name: x.detach().transpose(1, 2).contiguous().requires_grad_(x.requires_grad)
            for name, x in self.take(inputs).items()
        }
        return partial(forward_backward, causal_softmax, heads_first)


def causal_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention, heads before tokens."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def variants(config: PrefillConfig) -> list[Variant]:
    """All variants of the op, d = 1 and the fixed boundary among them as yardsticks."""
    return [
        Variant(vc_dim, gated, step)
        for gated in config.gates
        for vc_dim in sorted({1, *config.vc_dims})
        for step in sorted(set(config.window_steps), key=lambda step: step or 0)
        if step is None or vc_dim > 1  # at d = 1 the boundary changes nothing
    ]


def draw_inputs(
    config: HeadsConfig, seq_len: int, batch: int, heads: int, backward: bool = False, seed: int = 0
) -> Inputs:
    """Draw inputs of the configuration's widths, and a gradient to bring back if that is wanted."""
    generator = torch.Generator(config.device).manual_seed(seed)
    options: dict[str, Any] = {"device": config.device, "dtype": DTYPES[config.dtype]}

    def normal(*width: int) -> Tensor:
        return torch.randn(batch, seq_len, heads, *width, generator=generator, **options)

    q, k, v = normal(config.key_dim), normal(config.key_dim), normal(config.value_dim)
    inputs = {"q": q, "k": k, "v": v, "log_decay": normal().abs_().mul_(-0.05)}
    for leaf in inputs.values():
        leaf.requires_grad_(backward)
    return {**inputs, "grad_out": normal(config.value_dim)} if backward else inputs


def run_attention(config: PrefillConfig) -> dict[str, Any]:
    """Check every variant, measure memory, time all lengths; return the record."""
    device = measure.find_device(config.device, config.dtype)
    name = "train" if config.backward else "prefill"
    checks = [check for variant in variants(config) for check in check_variant(config, variant)]
    peers, refused = list[Peer](), list[dict[str, Any]]()
    if config.against == "sdpa":
        some = draw_inputs(config, CHECK_LEN, 1, config.heads)
        peers, more, refused = willing_peers(device, some)
        checks += more
    record = measure.begin_record(name, config, device, checks)
    # Memory first: what goes wrong there goes wrong before the long part.
    cases = list(product(config.seq_lens, variants(config))) if config.memory else []
    peaks = {
        case: measure.peak_extra_bytes(attention_workload, config, *case)
        for case in measure.show_progress(cases, f"{name}: memory")
    }
    # All lengths take turns with each other, since a growth exponent is a ratio too.
    candidates: dict[Key, Call] = {}
    for seq_len in config.seq_lens:
        candidates |= _candidates(config, seq_len, device, peers)
    timings = measure.time_in_turns(candidates, config.repeats, config.budget, device, name)
    rows = [
        _row(config, seq_len, variant, peaks.get((seq_len, variant)), timings)
        for seq_len, variant in product(config.seq_lens, (*variants(config), Variant(None)))
        if variant.vc_dim or config.compares_softmax(seq_len)
    ]
    rows += [
        _peer_row(config, seq_len, peer, timings)
        for seq_len, peer in product(config.seq_lens, peers)
    ]
    rows.sort(key=lambda row: config.seq_lens.index(row["seq_len"]))
    rates = [_rates(config, seq_len, timings) for seq_len in config.seq_lens]
    found = {"rows": rows, "growth": fit_growth(rows), "rates": rates, "refused": refused}
    return {**record, **found}


def check_variant(config: PrefillConfig, variant: Variant) -> list[dict[str, Any]]:
    """Compare output and gradients with the oracle in fp64, at a length that it can afford."""
    chunk_size = min(config.chunk_size, 64)
    seq_len = 8 * chunk_size - 3  # not a multiple of the chunk
    step = None if variant.window_step is None else max(1, seq_len // 6)
    short = replace(variant, window_step=step)
    inputs = draw_inputs(config, seq_len, 1, min(2, config.heads), config.backward, seed=1)
    exact = {name: x.detach().double().requires_grad_() for name, x in short.take(inputs).items()}
    found = short.bind(inputs, chunk_size)()
    mask = short.mask(seq_len, chunk_size)
    oracle = forward_backward(smat.reference_attention, exact, mask=mask)
    return measure.check(variant.name, f"T = {seq_len}", found, oracle, config.dtype)


def attention_workload(config: PrefillConfig, seq_len: int, variant: Variant) -> measure.Workload:
    """Inputs of one variant, made and touched, and what to run on them."""
    inputs = draw_inputs(config, seq_len, config.batch, config.heads, config.backward)
    few = draw_inputs(config, min(256, seq_len), 1, 1, config.backward)
    outputs = variant.take(inputs).values() if config.backward else [inputs["v"]]  # same sizes
    return measure.Workload(
        call=variant.bind(inputs, config.chunk_size),
        output_bytes=sum(x.nbytes for x in outputs),
        warm_up=variant.bind(few, 16),
        device=inputs["q"].device,
    )


def _candidates(
    config: PrefillConfig, seq_len: int, device: torch.device, peers: list[Peer]
) -> dict[Key, Call]:
    compared = config.compared_heads if config.compares_softmax(seq_len) else None
    found: dict[Key, Call] = {}
    for heads in sorted({config.heads, compared or config.heads}):
        inputs = draw_inputs(config, seq_len, config.batch, heads, config.backward)
        for variant in (*variants(config), *([Variant(None)] if heads == compared else [])):
            found[seq_len, variant.name, heads] = variant.bind(inputs, config.chunk_size)
    for peer in peers:
        found[seq_len, peer.name, config.heads] = peer.bind(inputs)
    if not config.backward:  # on features and augmented values that lie in memory
        phi, psi, values = (inputs[name].abs().float() for name in ("q", "k", "v"))
        found[seq_len, CAUSAL, config.heads] = partial(
            smat.smat_attention, phi, psi, F.pad(values, (0, 1), value=1.0),
            smat.SMatMask(seq_len, vc_dim=1, chunk_size=TILE, boundary=none()),
            feature_map="identity", normalize=False, branch="causal",
        )  # fmt: skip
    left, right = torch.rand(2, config.gemm_size, config.gemm_size, device=device)
    multiply = partial(torch.mm, left, right, out=torch.empty_like(left))
    found[seq_len, GEMM, config.heads] = multiply  # to hold everything else against
    return found


def _row(
    config: PrefillConfig,
    seq_len: int,
    variant: Variant,
    peak: int | None,
    timings: Mapping[Key, Timing],
) -> dict[str, Any]:
    """One variant at one length, with the theorem's bound on its working memory."""
    name, vc_dim, compared = variant.name, variant.vc_dim, config.compared_heads
    heads, gated = (config.heads, variant.gated) if vc_dim else (compared, config.gates[0])
    itemsize = DTYPES[config.dtype].itemsize
    # q, k, v and the output, with their gradients if there are some
    numbers = config.batch * seq_len * heads * 2 * (config.key_dim + config.value_dim)
    timing = timings[seq_len, name, heads]
    softmax = timings.get((seq_len, SOFTMAX, compared))
    row = {
        "seq_len": seq_len,
        "heads": heads,
        "io_bytes": numbers * (1 + config.backward) * itemsize,
        "name": name,
        **asdict(variant),
        "field_size": None,
        "timing": timing._asdict(),
        "ratio_to_d1": timing.ratio_to(timings[seq_len, Variant(1, gated).name, heads]),
        "ratio_to_plain": None,
        "softmax_ratio": softmax and softmax.ratio_to(timings[seq_len, name, compared]),
        "peak_extra_bytes": peak,
        "bound_bytes": None,
    }
    if vc_dim:
        plain = timings.get((seq_len, Variant(vc_dim).name, heads))
        row["field_size"] = variant.mask(seq_len, config.chunk_size).geometry.field_size
        row["ratio_to_plain"] = plain and timing.ratio_to(plain)
        # (T^(1-1/d) + T/c) r p + c^2 words a head
        states = seq_len ** (1 - 1 / vc_dim) + seq_len / config.chunk_size
        words = states * config.key_dim * (config.value_dim + 1) + config.chunk_size**2
        row["bound_bytes"] = config.batch * heads * words * itemsize
    return row


def _peer_row(
    config: PrefillConfig, seq_len: int, peer: Peer, timings: Mapping[Key, Timing]
) -> dict[str, Any]:
    """Another library's operation at one length, beside d = 1."""
    timing = timings[seq_len, peer.name, config.heads]
    plain = timings[seq_len, Variant(1, config.gates[0]).name, config.heads]
    known = {"seq_len": seq_len, "heads": config.heads, "name": peer.name, "gated": peer.gated}
    known |= {"vc_dim": None, "window_step": None}
    return {**known, "timing": timing._asdict(), "ratio_to_d1": timing.ratio_to(plain)}


def fit_growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Fit time = a T^b for every variant with two lengths or more, and return b."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        same = [row for row in rows if row["name"] == name]
        if len(same) > 1:
            lengths = [math.log(row["seq_len"]) for row in same]
            seconds = [math.log(row["timing"]["median"]) for row in same]
            found[name] = linear_regression(lengths, seconds).slope
    return found


def _rates(config: PrefillConfig, seq_len: int, timings: Mapping[Key, Timing]) -> dict[str, float]:
    """GFLOP/s of the matrix product and, when only the forward is timed, of the causal branch."""
    gemm = 2.0 * config.gemm_size**3 / timings[seq_len, GEMM, config.heads].median / 1e9
    found = {"seq_len": seq_len, "gemm": gemm}
    if not config.backward:
        aug_dim = config.value_dim + 1
        per_token = 2 * config.key_dim * aug_dim + TILE * (config.key_dim + aug_dim)
        flops = 2.0 * config.batch * seq_len * config.heads * per_token
        found["causal_branch"] = flops / timings[seq_len, CAUSAL, config.heads].median / 1e9
        found["fraction_of_gemm"] = found["causal_branch"] / gemm
        whole = timings.get((seq_len, Variant(1).name, config.heads))
        if whole is not None:
            found["whole_op_fraction_of_gemm"] = flops / whole.median / 1e9 / gemm
    return found
