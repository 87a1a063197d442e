"""The op against the dense oracle, over everything that it takes, together."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import smat
from tests.fuzz.attention import check_call, draw_call
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


class Drawn:
    """Answers the questions of a drawn call from hypothesis."""

    def __init__(self, draw):
        self.draw = draw

    def pick(self, name, options):
        return self.draw(st.sampled_from(options), label=name)


@st.composite
def calls(draw, dtype):
    return draw_call(Drawn(draw), dtype)


@given(calls("float64"))
@settings(max_examples=150)
def test_equals_the_oracle_in_fp64(call):
    check_call(call)


@given(calls("float32"))
@settings(max_examples=100)
def test_equals_the_oracle_in_fp32(call):
    check_call(call)


def test_a_single_token_in_fp32():
    inputs = make_inputs(1, dtype=torch.float32) | {"key_gate": torch.full((2, 1, 2), 0.1)}
    mask = smat.SMatMask(1, 3, 8)
    (out, grads), (true_out, true_grads) = attend(inputs, mask), attend_densely(inputs, mask)
    assert relative_rms(out, true_out) <= 1e-5
    assert relative_rms(grads["v"], true_grads["v"]) <= 1e-4
    size = grads["v"].abs().max()
    for name in ("q", "k", "key_gate"):  # 0 but for roundings, which the gate divides
        assert grads[name].abs().max() <= 1e-5 * size


@given(calls("bfloat16"))
@settings(max_examples=60)
def test_equals_the_oracle_in_bf16(call):
    check_call(call)


@given(calls("float16"))
@settings(max_examples=30)
def test_equals_the_oracle_in_fp16(call):
    check_call(call)


@pytest.mark.slow
@given(calls("float64"))
@settings(max_examples=3000)
def test_equals_the_oracle_in_fp64_everywhere(call):
    check_call(call)


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
