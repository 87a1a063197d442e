"""The native step against the torch step: outputs and every table, token by token."""

import copy
import pickle

import pytest
import torch

import smat
from smat.ops.backend import available_backends
from smat.ops.native import arguments
from smat.ops.smat.native.decode import Stepper
from smat.ops.smat.state import GATES
from tests.ops.smat.comparison import relative_rms
from tests.ops.smat.decoding import KINDS, SCHEDULES, at, empty_for, make_case

pytestmark = [
    pytest.mark.filterwarnings("ignore::smat.SMatWarning"),
    pytest.mark.skipif("native" not in available_backends(), reason="no C++ compiler"),
]
LENGTH = 60


def steps(state, inputs, backend, length=LENGTH):
    """Decode, in place, and return all answers."""
    return torch.stack(
        [state.step(**at(inputs, t), inplace=True, backend=backend)[0] for t in range(length)]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
def test_equals_the_torch_step(vc_dim, schedule, kind):
    mask = smat.SMatMask(LENGTH, vc_dim, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, LENGTH, kind, harsh=vc_dim == 3)
    options = {"branch": "long_range"} if schedule == "doubling" else {}
    native, torch_state = (empty_for(mask, inputs, **options) for _ in range(2))
    found, expected = steps(native, inputs, "native"), steps(torch_state, inputs, "torch")
    assert isinstance(native.numbers, Stepper)  # and not the torch step in its place
    assert relative_rms(found, expected) <= 1e-12
    assert native.tensors.keys() == torch_state.tensors.keys()
    assert native.positions == torch_state.positions
    assert native.built == torch_state.built
    for name, table in torch_state.tensors.items():
        assert relative_rms(native.tensors[name], table) <= 1e-12, name
        if name in GATES:  # what the sum lost is too small to show beside it
            lost, expected = native.tensors[name][..., 1], table[..., 1]
            torch.testing.assert_close(lost, expected, rtol=1e-6, atol=1e-30, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_weighted_reads_of_other_dtypes(dtype, monkeypatch):
    monkeypatch.setattr(arguments, "THREAD_WORK", 1)
    mask = smat.SMatMask(LENGTH, 3, 8, 5)
    inputs = make_case(mask, LENGTH, "gated and routed", batch=3)
    types = inputs["query_type"]
    inputs["query_type"] = torch.stack([types, (types + 3) % mask.geometry.num_types], -1)
    inputs["read_weight"] = torch.rand(inputs["query_type"].shape)
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    native, torch_state = (empty_for(mask, inputs) for _ in range(2))
    found, expected = steps(native, inputs, "native"), steps(torch_state, inputs, "torch")
    assert found.dtype == dtype
    assert relative_rms(found, expected) <= {torch.float32: 1e-5, torch.bfloat16: 5e-3}[dtype]


def test_rows_at_different_positions():
    mask = smat.SMatMask(LENGTH, 3, 8, boundary=smat.schedules.window(8))
    inputs = make_case(mask, LENGTH, "gated", batch=3)
    real = torch.arange(40) < torch.tensor([[40], [3], [17]])
    answers = []
    for backend in ("native", "torch"):
        state = empty_for(mask, inputs)
        prompt = {name: x[:, :40] for name, x in inputs.items()}
        _, state = state.extend(**prompt, attention_mask=real, inplace=True)
        answers.append(steps(state, inputs, backend, 30))
    assert relative_rms(*answers) <= 1e-12


def test_a_fork_and_copies_go_their_own_way():
    mask = smat.SMatMask(LENGTH, 2, 8)
    inputs = make_case(mask, LENGTH)
    state = empty_for(mask, inputs)
    steps(state, inputs, "native", 40)
    token = at(inputs, 40)
    expected, fork = state.step(**token, backend="torch")
    for other in (state.fork(), copy.deepcopy(state), pickle.loads(pickle.dumps(state)), fork):
        start = other.positions[0]
        out, after = other.step(**token, inplace=True, backend="native")
        assert after.positions[0] == start + 1
        if start == 40:
            assert relative_rms(out, expected) <= 1e-12
    assert state.positions == [40, 40]
    out, _ = state.step(**token, inplace=True, backend="native")
    assert relative_rms(out, expected) <= 1e-12


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("log_decay", 0.1, "log_decay must be at most 0"),
        ("key_gate", -0.5, "key_gate must not be negative"),
        ("profile", 10**6, "profile must lie in"),
        ("query_type", -1, "query_type must lie in"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_written(name, value, message):
    mask = smat.SMatMask(LENGTH, 3, 8)
    inputs = make_case(mask, LENGTH, "gated and routed")
    state = empty_for(mask, inputs)
    steps(state, inputs, "native", 40)
    before = {each: x.clone() for each, x in state.tensors.items()}
    token = at(inputs, 40)
    with pytest.raises(ValueError, match=message):
        state.step(**token | {name: torch.full_like(token[name], value)}, inplace=True)
    assert state.positions == [40, 40]
    assert all(torch.equal(x, before[each]) for each, x in state.tensors.items())
    assert state.step(**token, inplace=True)[0].isfinite().all()


def test_a_token_that_looks_otherwise_is_checked_again():
    mask = smat.SMatMask(LENGTH, 2, 8)
    inputs = make_case(mask, LENGTH)
    state = empty_for(mask, inputs)
    steps(state, inputs, "native", 3)
    token = at(inputs, 3)
    with pytest.raises(ValueError, match="share a width"):
        state.step(**token | {"k_t": token["k_t"][..., :2]}, inplace=True)
    gaps = {name: x.mT.contiguous().mT for name, x in token.items()}
    expected, _ = state.step(**token, backend="torch")
    out, _ = state.step(**gaps, inplace=True)
    assert relative_rms(out, expected) <= 1e-12
