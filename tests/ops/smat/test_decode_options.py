"""What a step can be asked: several types, one hyperplane, other features, heads and dtypes."""

import pytest
import torch

import smat
from smat.masks import type_through_cell
from tests.ops.smat.comparison import mild_gates, relative_rms
from tests.ops.smat.decoding import (
    SCHEDULES,
    at,
    decode,
    empty_for,
    make_case,
    prefill,
    span,
    worst_row,
)

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")


def unnormalised_state(mask, inputs, split):
    _, state = prefill(span(inputs, 0, split), mask, normalize=False)
    return state


@pytest.mark.parametrize("boundary", [None, smat.schedules.window(16)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_reading_several_types_is_the_weighted_sum_of_single_reads(boundary, kind):
    mask = smat.SMatMask(97, 3, 8, boundary=boundary)
    inputs = make_case(mask, 97, kind)
    state = unnormalised_state(mask, inputs, 70)
    shape = (2, 4, 3)
    types = torch.randint(mask.geometry.num_types, shape, generator=torch.Generator())
    weights = torch.rand(shape, dtype=torch.float64)
    token = at(inputs, 70)
    found, _ = state.step(**token, query_type=types, read_weight=weights)
    nothing = torch.zeros(2, 4, 1, dtype=torch.float64)
    recent, _ = state.step(**token, query_type=types[..., :1], read_weight=nothing)
    expected = recent + sum(
        weights[..., read, None] * (state.step(**token, query_type=types[..., read])[0] - recent)
        for read in range(3)
    )
    assert relative_rms(found, expected) <= 1e-12
    unweighted, _ = state.step(**token, query_type=types)
    ones, _ = state.step(**token, query_type=types, read_weight=torch.ones_like(weights))
    assert torch.equal(unweighted, ones)


def test_several_reads_over_several_tokens_are_those_of_the_steps():
    mask = smat.SMatMask(97, 2, 8, boundary=smat.schedules.window(16))
    inputs = make_case(mask, 97, "gated")
    reads = (*inputs["q"].shape[:3], 4)
    inputs["query_type"] = torch.randint(mask.geometry.num_types, reads)
    inputs["read_weight"] = torch.rand(reads, dtype=torch.float64)
    steps, _ = decode(empty_for(mask, inputs), inputs)
    at_once, _ = empty_for(mask, inputs).extend(**inputs)
    assert worst_row(at_once, steps) <= 1e-12


def test_a_single_hyperplane_through_the_querys_own_cell():
    mask = smat.SMatMask(97, 3, 8)
    inputs = make_case(mask, 97)
    cells = torch.randint(mask.geometry.num_profiles, inputs["q"].shape[:3])
    directions = torch.randint(mask.geometry.num_directions, inputs["q"].shape[:3])
    inputs["query_type"] = type_through_cell(mask.geometry, directions, cells)
    found, _ = decode(empty_for(mask, inputs), inputs)
    assert worst_row(found, smat.reference_attention(mask=mask, **inputs)) <= 1e-12


def double_width(x):
    return torch.cat([x.relu(), (-x).relu()], -1) + 0.1


@pytest.mark.parametrize(
    "feature_map",
    ["relu", "identity", "favor", double_width],
    ids=["relu", "identity", "favor", "callable"],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_feature_maps(feature_map, normalize):
    mask = smat.SMatMask(97, 2, 8, boundary=smat.schedules.window(16))
    inputs = make_case(mask, 97)
    if feature_map == "identity":
        inputs["q"], inputs["k"] = inputs["q"].abs(), inputs["k"].abs()
    options = {"feature_map": feature_map, "normalize": normalize}
    whole, _ = smat.smat_attention(mask=mask, **inputs, **options)
    _, state = prefill(span(inputs, 0, 50), mask, **options)
    found, _ = decode(state, inputs, 50)
    assert worst_row(found, whole[:, 50:]) <= 1e-12


def test_gates_for_each_query_head_give_each_its_own_tables():
    mask = smat.SMatMask(97, 2, 8)
    inputs = make_case(mask, 97)
    inputs["log_decay"] = mild_gates(inputs["q"].shape[:3])
    whole, _ = smat.smat_attention(mask=mask, **inputs)
    _, state = prefill(span(inputs, 0, 40), mask)
    assert state.spec.heads == inputs["q"].shape[2]
    found, _ = decode(state, inputs, 40)
    assert worst_row(found, whole[:, 40:]) <= 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-5), (torch.bfloat16, 5e-3), (torch.float16, 5e-3)],
    ids=str,
)
def test_lower_precision_is_summed_in_fp32(dtype, tolerance):
    mask = smat.SMatMask(256, 3, 8, boundary=smat.schedules.window(32))
    exact = make_case(mask, 256, "gated")
    inputs = {name: x.to(dtype) for name, x in exact.items()}
    expected = smat.reference_attention(mask=mask, **{n: x.double() for n, x in inputs.items()})
    _, state = prefill(span(inputs, 0, 100), mask)
    found, state = decode(state, inputs, 100)
    assert (found.dtype, state.dtype) == (dtype, torch.float32)
    assert relative_rms(found, expected[:, 100:]) <= tolerance


def test_autocast_leaves_the_state_alone():
    mask = smat.SMatMask(97, 2, 8)
    inputs = {name: x.float() for name, x in make_case(mask, 97, "gated").items()}
    expected, _ = decode(empty_for(mask, inputs), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = decode(empty_for(mask, inputs), inputs)
    assert torch.equal(found, expected)


def test_a_compiled_step_is_a_step():
    mask = smat.SMatMask(97, 2, 8, boundary=smat.schedules.window(8))
    inputs = make_case(mask, 60)

    def layer(state, q_t, k_t, v_t, inplace):
        out, after = state.step(q_t * 2, k_t, v_t, inplace=inplace)
        return out + 1, after

    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager")
    for inplace in (False, True):
        plain, traced = empty_for(mask, inputs), empty_for(mask, inputs)
        for t in range(60):
            token = at(inputs, t)
            expected, plain = layer(plain, **token, inplace=inplace)
            before, positions = traced, traced.positions
            found, traced = compiled(traced, **token, inplace=inplace)
            assert torch.equal(found, expected)
            assert (before is traced) == inplace
            assert inplace or before.positions == positions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_t": torch.zeros(2, 3, 4)}, "got 3 and 2"),
        ({"k_t": torch.zeros(3, 2, 4)}, r"k \(3, 1, 2, 4\)"),
        ({"k_t": torch.zeros(2, 2, 5)}, r"share a width.* k \(2, 1, 2, 5\)"),
        ({"v_t": torch.zeros(2, 2, 4)}, "width 3, got"),
        ({"k_t": torch.zeros(2, 2, 4, dtype=torch.long)}, "floating-point, got torch.int64"),
        ({"log_decay": torch.full((2, 2), 0.5)}, "at most 0, got 0.5"),
        ({"log_decay": torch.zeros(2, 3)}, r"2 or 4\), got \(2, 1, 3\)"),
        ({"key_gate": torch.zeros(2)}, r"key_gate must be \(batch, heads"),
        ({"profile": torch.full((2, 2), 7)}, r"\[0, 7\).* from 7 to 7"),
        ({"query_type": torch.full((2, 4), -1)}, r"\[0, 7\).* from -1 to -1"),
        (
            {"query_type": torch.zeros(2, 2, dtype=torch.long)},
            r"query_type must be .* = \(2, 1, 4\)",
        ),
        ({"read_weight": torch.zeros(2, 4)}, "query_type, which is missing"),
    ],
)
def test_bad_tokens_are_refused_with_their_numbers_and_change_nothing(change, message):
    mask = smat.SMatMask(97, 2, 8)
    inputs = make_case(mask, 97)
    _, state = prefill(span(inputs, 0, 48), mask)
    token = at({name: x.float() for name, x in inputs.items()}, 48)
    with pytest.raises(ValueError, match=message):
        state.step(**token | change, inplace=True)
    assert state.positions == [48, 48]


def test_bad_states_are_refused():
    mask = smat.SMatMask(97, 1, 8)
    sizes = {"batch": 1, "heads": 2, "key_dim": 4, "value_dim": 4}
    for change, message in (
        ({"heads": 0}, "heads must be 1 or more, but it is 0"),
        ({"query_heads": 3}, "3 query heads are no multiple of 2"),
        ({"dtype": torch.bfloat16}, "float32 or float64, got torch.bfloat16"),
        ({"fold": "later"}, "spread, at_once, got 'later'"),
    ):
        with pytest.raises(ValueError, match=message):
            smat.SMatState.empty(mask, **sizes | change)
    plain = smat.SMatState.empty(mask, **sizes)
    token = torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match="weighted=True"):
        plain.step(token, token, token, write_weight=torch.ones(1, 2))


@pytest.mark.parametrize("branch", ["both", "causal", "long_range"])
@pytest.mark.parametrize("scope", ["all", "recurrent"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_serve_one_branch_and_either_scope_of_decay(schedule, scope, branch):
    mask = smat.SMatMask(97, 2, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 97, "gated and routed")
    options = {"branch": branch, "decay_scope": scope, "normalize": False}
    whole = smat.reference_attention(mask=mask, **inputs, **options)
    found, _ = decode(empty_for(mask, inputs, **options), inputs)
    assert worst_row(found, whole) <= 1e-12
    for split in (20, 60):
        _, state = prefill(span(inputs, 0, split), mask, **options)
        assert worst_row(decode(state, inputs, split)[0], whole[:, split:]) <= 1e-12
