"""The op against the dense oracle, over everything that it takes, together."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import smat
from tests.ops.smat.comparison import (
    TOLERANCE,
    assert_matches_oracle,
    attend,
    attend_densely,
    make_inputs,
    mild_gates,
    mixed_gates,
    relative_rms,
    small_blocks,
)

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")

LENGTHS = [1, 2, 3, 7, 16, 31, 48, 61, 64, 65, 97, 128, 131, 150]
SCHEDULES = ("default", "none", "kept", "rebuilt", "doubling", "window")


@dataclass
class Case:
    """One drawn call: tensors, mask, options, and the op's block sizes."""

    inputs: dict[str, torch.Tensor]
    mask: smat.SMatMask
    options: dict[str, Any]
    tile: int


def draw_boundary(draw, seq_len):
    kind = draw(st.sampled_from(SCHEDULES))
    event(f"boundary {kind}")
    if kind == "kept":
        return smat.schedules.kept(draw(st.integers(0, seq_len)))
    if kind == "window":
        return smat.schedules.window(draw(st.sampled_from([1, 2, 5, 8, 16, 30])))
    plain = {
        "none": smat.schedules.none,
        "rebuilt": smat.schedules.rebuilt,
        "doubling": smat.schedules.doubling,
    }
    return plain[kind]() if kind in plain else None


def draw_layout(draw, seq_len, batch):
    """Draw padding on either side, packing, or neither."""
    layout = draw(st.sampled_from(["plain", "plain", "padded", "packed"]))
    event(layout)
    if layout == "padded":
        real = torch.zeros(batch, seq_len, dtype=torch.long)
        for row in real:
            start = draw(st.integers(0, seq_len))
            row[start : draw(st.integers(start, seq_len))] = 1
        return batch, {"attention_mask": real}
    if layout == "packed":
        inner = draw(st.lists(st.integers(0, seq_len), max_size=4))
        return 1, {"cu_seqlens": torch.tensor([0, *sorted(inner), seq_len])}
    return batch, {}


def draw_routing(draw, case_mask, shape, group, packed, generator):
    """Draw profiles and types by content, small enough for every packed sequence's geometry."""
    routing = {}
    geometry = case_mask.geometry
    batch, seq_len, heads = shape
    profile_heads = draw(st.sampled_from([heads, heads * group]))
    if draw(st.booleans()):
        limit = 1 if packed else geometry.num_profiles
        profile_shape = (batch, seq_len, profile_heads)
        routing["profile"] = torch.randint(limit, profile_shape, generator=generator)
    if draw(st.booleans()):
        limit = 1 if packed else geometry.num_types
        reads = draw(st.sampled_from([(), (), (1,), (2,), (5,)]))
        event(f"reads {reads}")
        type_shape = (batch, seq_len, heads * group, *reads)
        routing["query_type"] = torch.randint(limit, type_shape, generator=generator)
        if draw(st.booleans()):
            weight = torch.rand(type_shape, generator=generator, dtype=torch.float64)
            routing["read_weight"] = 0.05 + weight
    return routing


def draw_gates(draw, shape, group, generator):
    """Draw gates, key gates and write weights, for each key head or for each query head."""
    batch, seq_len, heads = shape
    gates = {}
    kind = draw(st.sampled_from(["none", "mild", "mixed"]))
    event(f"gates {kind}")

    def size():
        return (batch, seq_len, draw(st.sampled_from([heads, heads * group])))

    if kind != "none":
        make = mild_gates if kind == "mild" else mixed_gates
        gates["log_decay"] = make(size(), seed=draw(st.integers(0, 99)))
    for name in ("key_gate", "write_weight"):
        if draw(st.booleans()):
            gates[name] = 0.05 + torch.rand(size(), generator=generator, dtype=torch.float64)
    return gates


@st.composite
def cases(draw, dtype):
    # Of a single token every gradient but that of v is 0, which only fp64 tells from rounding.
    shortest = 1 if dtype == torch.float64 else 2
    seq_len = draw(st.sampled_from([length for length in LENGTHS if length >= shortest]))
    batch, options = draw_layout(draw, seq_len, draw(st.sampled_from([1, 2])))
    heads, group = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 1, 2, 3]))
    seed = draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)
    mask = smat.SMatMask(
        seq_len=seq_len + draw(st.sampled_from([0, 0, 1, 50])),
        vc_dim=draw(st.integers(1, 5)),
        chunk_size=draw(st.sampled_from([1, 2, 5, 8, 16, 64])),
        field_size=draw(st.sampled_from([None, None, 2, 3, 5])),
        boundary=draw_boundary(draw, seq_len),
    )
    shape = (batch, seq_len, heads)
    sharing = draw(st.sampled_from(["queries", "values"]))
    inputs = make_inputs(seq_len, batch=batch, heads=heads, group=group, seed=seed, sharing=sharing)
    inputs |= draw_gates(draw, shape, group, generator)
    inputs |= draw_routing(draw, mask, shape, group, "cu_seqlens" in options, generator)
    options["normalize"] = draw(st.booleans())
    options["decay_scope"] = draw(st.sampled_from(["all", "all", "recurrent"]))
    features = ["elu", "favor", torch.nn.functional.softplus]
    if not options["normalize"]:
        features += ["identity", "relu"]
    options["feature_map"] = draw(st.sampled_from(features))
    if draw(st.booleans()):
        rows = draw(st.lists(st.integers(0, seq_len - 1), max_size=9))
        options["positions"] = torch.tensor(rows, dtype=torch.long)
    floating = {name: x.to(dtype) for name, x in inputs.items() if x.is_floating_point()}
    return Case(inputs | floating, mask, options, draw(st.sampled_from([4, 16, 64])))


def check(case):
    with small_blocks(tile=case.tile):
        assert_matches_oracle(case.inputs, case.mask, **case.options)


@given(cases(torch.float64))
@settings(max_examples=150)
def test_equals_the_oracle_in_fp64(case):
    check(case)


@given(cases(torch.float32))
@settings(max_examples=100)
def test_equals_the_oracle_in_fp32(case):
    check(case)


def test_a_single_token_in_fp32():
    inputs = make_inputs(1, dtype=torch.float32) | {"key_gate": torch.full((2, 1, 2), 0.1)}
    mask = smat.SMatMask(1, 3, 8)
    (out, grads), (true_out, true_grads) = attend(inputs, mask), attend_densely(inputs, mask)
    assert relative_rms(out, true_out) <= 1e-5
    assert relative_rms(grads["v"], true_grads["v"]) <= 1e-4
    size = grads["v"].abs().max()
    for name in ("q", "k", "key_gate"):  # 0 but for roundings, which the gate divides
        assert grads[name].abs().max() <= 1e-5 * size


@given(cases(torch.bfloat16))
@settings(max_examples=60)
def test_equals_the_oracle_in_bf16(case):
    check(case)


@given(cases(torch.float16))
@settings(max_examples=30)
def test_equals_the_oracle_in_fp16(case):
    check(case)


@pytest.mark.slow
@given(cases(torch.float64))
@settings(max_examples=3000)
def test_equals_the_oracle_in_fp64_everywhere(case):
    check(case)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4, 5])
def test_whole_blocks_of_default_size(vc_dim, dtype):
    """Long enough for several chunks of the op's own sizes, on both sides of the boundary."""
    inputs = make_inputs(700, batch=1, key_dim=6, value_dim=5, dtype=dtype)
    inputs["log_decay"] = mild_gates((1, 700, 2), strength=0.05).to(dtype)
    assert_matches_oracle(inputs, smat.SMatMask(700, vc_dim))


@pytest.mark.parametrize(
    "boundary",
    [smat.schedules.window(100), smat.schedules.doubling(), smat.schedules.kept(333)],
    ids=lambda b: b.describe(),
)
def test_moving_boundary_over_blocks_of_default_size(boundary):
    inputs = make_inputs(700, batch=1)
    inputs["log_decay"] = mixed_gates((1, 700, 2))
    assert_matches_oracle(inputs, smat.SMatMask(700, 3, boundary=boundary))


@pytest.mark.parametrize("content", [False, True])
@pytest.mark.parametrize("gates", [None, mild_gates, mixed_gates])
@pytest.mark.parametrize(
    "boundary",
    [
        None,
        smat.schedules.window(30),
        smat.schedules.doubling(),
        smat.schedules.kept(70),
        smat.schedules.none(),
    ],
    ids=lambda b: b.describe() if b else "default",
)
def test_many_blocks_between_boundaries(boundary, gates, content):
    """Windows that span several blocks, several shares, and several blocks of features."""
    mask = smat.SMatMask(131, 3, 8, boundary=boundary)
    inputs = make_inputs(131, group=2)
    if gates is not None:
        inputs["log_decay"] = gates((2, 131, 2))
    if content:
        generator = torch.Generator().manual_seed(0)
        geometry = mask.geometry
        inputs["profile"] = torch.randint(geometry.num_profiles, (2, 131, 2), generator=generator)
        inputs["query_type"] = torch.randint(geometry.num_types, (2, 131, 4), generator=generator)
    for positions in (None, torch.tensor([130, 3, 77, 77, 35])):
        with small_blocks(tile=4, tiles=2, tokens=200, table_bytes=1000):
            assert_matches_oracle(inputs, mask, positions=positions)


def test_a_window_runs_past_its_horizon():
    inputs = make_inputs(90)
    assert_matches_oracle(inputs, smat.SMatMask(40, 3, 4, boundary=smat.schedules.window(8)))
