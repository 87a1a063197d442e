"""The fused decoding step against the torch step: outputs and every tensor of the state."""

import pytest
import torch

import smat
from smat.ops.smat.routing import Gates, Routing
from smat.ops.smat.triton.decode import FusedStep
from tests.ops.smat.comparison import poisoned_memory
from tests.ops.smat.decoding import at, empty_for, make_case, snapshot, unchanged

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")

BOUNDARIES = {
    "window": smat.schedules.window(2),
    "short window": smat.schedules.window(1),
    "doubling": smat.schedules.doubling(),
    "kept": smat.schedules.kept(3),
    "none": smat.schedules.none(),
}


def mask_of(vc_dim, boundary, seq_len=16):
    return smat.SMatMask(seq_len, vc_dim, 4, field_size=2, boundary=BOUNDARIES[boundary])


def single(inputs, dtype=torch.float32):
    """Round q, k, v to a dtype, all other numbers to fp32."""
    return {
        name: x.to(dtype if name in "qkv" else torch.float32) if x.is_floating_point() else x
        for name, x in inputs.items()
    }


def with_reads(inputs, mask, num_reads):
    """Let every query read several types, weighted."""
    shape = (*inputs["q"].shape[:2], max(inputs["q"].shape[2], inputs["v"].shape[2]), num_reads)
    generator = torch.Generator().manual_seed(5)
    types = torch.randint(mask.geometry.num_types, shape, generator=generator)
    return inputs | {"query_type": types, "read_weight": torch.rand(shape, generator=generator)}


def worst(found, expected):
    """The largest difference, relative to the largest number that is expected."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


def assert_states_equal(found, expected):
    assert found.tensors.keys() == expected.tensors.keys()
    for name, x in expected.tensors.items():
        assert worst(found.tensors[name], x) <= 1e-5, name
    assert (found.positions, found.built) == (expected.positions, expected.built)


def compare(inputs, state, tolerance=1e-5, inplace=True):
    """Decode on both backends from copies of a state, and compare every token."""
    one, other = state.clone(), state.clone()
    for t in range(inputs["k"].shape[1]):
        expected, one = one.step(**at(inputs, t), inplace=inplace, backend="torch")
        with poisoned_memory():
            found, other = other.step(**at(inputs, t), inplace=inplace, backend="triton")
        assert worst(found, expected) <= tolerance, t
    assert_states_equal(other, one)


@pytest.mark.parametrize(
    ("vc_dim", "boundary", "kind", "group"),
    [
        (1, "none", "gated", 1),
        (2, "window", "gated and routed", 2),
        (3, "kept", "gated", 3),
        (3, "doubling", "plain", 1),
        (4, "short window", "routed", 1),
    ],
)
def test_every_token_is_that_of_the_torch_step(vc_dim, boundary, kind, group):
    mask = mask_of(vc_dim, boundary)
    inputs = single(make_case(mask, 8, kind, batch=1, heads=1, group=group, harsh=True))
    compare(inputs, empty_for(mask, inputs))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "gated", "routed", "gated and routed"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
def test_every_mask_and_kind(vc_dim, boundary, kind):
    mask = mask_of(vc_dim, boundary, 32)
    for group in (1, 3):
        inputs = single(make_case(mask, 25, kind, batch=2, heads=2, group=group, harsh=True))
        compare(inputs, empty_for(mask, inputs))
        compare(inputs, empty_for(mask, inputs, fold="at_once"))


def test_several_weighted_reads_and_blocks_of_features(monkeypatch):
    monkeypatch.setattr("smat.ops.smat.triton.decode.TILE", 16)
    mask = mask_of(3, "window")
    inputs = with_reads(make_case(mask, 7, "gated", batch=1, heads=1, group=2), mask, 4)
    inputs = single({**inputs, "v": torch.randn(1, 7, 1, 5)})
    compare(inputs, empty_for(mask, inputs))


def test_heads_of_values_that_share_keys():
    mask = mask_of(2, "window")
    inputs = make_case(mask, 6, "plain", batch=1, heads=1, group=2, sharing="values")
    inputs["log_decay"] = -torch.rand(1, 6, 2)
    inputs["key_gate"] = torch.rand(1, 6, 1)
    compare(single(inputs), empty_for(mask, single(inputs)))


@pytest.mark.parametrize(
    "options",
    [
        {"normalize": False},
        {"branch": "long_range"},
        {"branch": "causal"},
        {"decay_scope": "recurrent", "feature_map": "relu"},
        {"feature_map": lambda x: x.abs().repeat(1, 1, 1, 2), "feature_dim": 8},
    ],
    ids=["unnormalised", "long range", "causal", "recurrent decay", "own features"],
)
def test_options(options):
    mask = mask_of(2, "window")
    inputs = single(make_case(mask, 6, "gated", batch=1, heads=1, group=1))
    compare(inputs, empty_for(mask, inputs, **options))


def test_rows_at_different_positions():
    mask = mask_of(3, "window")
    inputs = single(make_case(mask, 8, "gated", batch=3, heads=1, group=1))
    real = torch.tensor([[1] * 4, [1] * 3 + [0], [1] * 4])
    first = {name: x[:, :4] for name, x in inputs.items()}
    _, state = empty_for(mask, inputs).extend(**first, attention_mask=real)
    assert len(set(state.positions)) == 2
    compare({name: x[:, 4:8] for name, x in inputs.items()}, state)


def test_gates_that_come_and_go():
    mask = mask_of(2, "window")
    inputs = single(make_case(mask, 8, "gated", batch=1, heads=1, group=1))
    one, other = (empty_for(mask, inputs) for _ in range(2))
    for t in range(8):
        token = at(inputs, t)
        if t % 3 == 0:
            token["log_decay"] = None
        expected, one = one.step(**token, inplace=True, backend="torch")
        found, other = other.step(**token, inplace=True, backend="triton")
        assert worst(found, expected) <= 1e-5
    assert_states_equal(other, one)


def test_half_precision():
    mask = mask_of(2, "window")
    inputs = single(make_case(mask, 6, "gated", batch=1, heads=1, group=1), torch.float16)
    compare(inputs, empty_for(mask, inputs), tolerance=5e-3)


def test_an_old_state_stays_valid():
    mask = mask_of(2, "window")
    inputs = single(make_case(mask, 8, "gated", batch=1, heads=1, group=1))
    state = empty_for(mask, inputs)
    for t in range(4):
        _, state = state.step(**at(inputs, t), inplace=True, backend="triton")
    before = snapshot(state)
    ways = [state.step(**at(inputs, t), backend="triton") for t in (4, 5)]
    again, _ = state.step(**at(inputs, 4), backend="triton")
    assert unchanged(state, before)
    assert torch.equal(again, ways[0][0])
    for out, after in ways:  # which share memory with each other, and the numbers on the device
        assert not torch.equal(out, after.step(**at(inputs, 6), backend="triton")[0])
    compare({name: x[:, 6:] for name, x in inputs.items()}, ways[1][1], inplace=False)


@pytest.mark.parametrize("boundary", ["window", "kept"])
def test_a_captured_step_has_static_memory_and_numbers(boundary):
    """What a graph replays: one launch on the same memory, whatever the host has counted."""
    mask = mask_of(2, boundary)
    inputs = single(make_case(mask, 8, "gated", batch=1, heads=1, group=1))
    expected_state = empty_for(mask, inputs)
    state = empty_for(mask, inputs)
    step, memory = FusedStep(state, gated=True), None
    for t in range(8):
        token = at(inputs, t)
        expected, expected_state = expected_state.step(**token, inplace=True, backend="torch")
        step.before_token()
        gates = Gates(token["log_decay"], token["key_gate"])
        found = step.launch(token["q_t"], token["k_t"], token["v_t"], gates, Routing())
        step.after_token()
        assert worst(found, expected) <= 1e-5, t
        addresses = {name: x.data_ptr() for name, x in step.tensors.items()}
        addresses["place"] = step.numbers.place.data_ptr()
        assert memory in (None, addresses)
        memory = addresses
    for name, x in expected_state.tensors.items():
        assert worst(state.tensors[name], x) <= 1e-5, name


def test_a_captured_step_refuses_what_it_has_no_room_for():
    mask = mask_of(2, "window")
    inputs = single(make_case(mask, 1, "gated", batch=1, heads=1, group=1))
    token, step = at(inputs, 0), FusedStep(empty_for(mask, inputs))
    step.before_token()
    with pytest.raises(ValueError, match="gated=True"):
        step.launch(token["q_t"], token["k_t"], token["v_t"], Gates(token["log_decay"]))
    with pytest.raises(ValueError, match=r"float32, got torch\.float64"):
        FusedStep(empty_for(mask, make_case(mask, 1)))


def test_fp64_goes_to_torch_and_a_cpu_needs_the_interpreter(monkeypatch):
    mask = mask_of(2, "window")
    inputs = make_case(mask, 2, "plain", batch=1, heads=1)
    state = empty_for(mask, inputs)
    out, _ = state.step(**at(inputs, 0), backend="triton")
    assert torch.equal(out, state.step(**at(inputs, 0), backend="torch")[0])
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        state.step(**at(single(inputs), 0), backend="triton")
