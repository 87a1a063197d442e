"""The chunked delta rule against the sequential one, and against other libraries'."""

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smat.ops.delta_rule import chunks, delta_rule, delta_rule_step
from smat.ops.delta_rule.delta_rule import _forward
from smat.ops.delta_rule.reference import delta_rule_reference
from tests.ops.recurrent import assert_transforms, error

NAMES = ("q", "k", "v", "beta", "log_decay", "initial_state")


def make_inputs(seq_len, *, batch=2, heads=2, key_dim=5, value_dim=4, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, seq_len, heads)
    q, k = torch.randn(2, *shape, key_dim, generator=generator, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    v = torch.randn(*shape, value_dim, generator=generator, dtype=torch.float64)
    beta = torch.rand(shape, generator=generator, dtype=torch.float64)
    log_decay = -torch.rand(shape, generator=generator, dtype=torch.float64)
    state = torch.randn(batch, heads, key_dim, value_dim, generator=generator, dtype=torch.float64)
    given = (q, k, v, beta, log_decay, state)
    return {n: x.to(dtype).requires_grad_() for n, x in zip(NAMES, given, strict=True)}


def run(op, inputs, **kwargs):
    out, state = op(**inputs, **kwargs)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(x.shape, generator=generator).to(x) for x in (out, state)]
    loss = (out * weights[0]).sum() + (state * weights[1]).sum()
    wanted = {n: x for n, x in inputs.items() if x is not None}
    grads = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    return {"out": out, "state": state, **dict(zip(wanted, grads, strict=True))}


def assert_same(inputs, tolerance, grad_tolerance, **kwargs):
    found = run(delta_rule, inputs, output_final_state=True, **kwargs)
    given = {n: x for n, x in inputs.items() if x is not None}
    wide = {n: x.detach().double().requires_grad_() for n, x in given.items()}
    expected = run(delta_rule_reference, wide)
    for name in expected:
        limit = tolerance if name in ("out", "state") else grad_tolerance
        assert error(found[name], expected[name]) <= limit, name
        assert found[name].isfinite().all(), name


@pytest.mark.parametrize("chunk_size", [2, 8, 64])
@pytest.mark.parametrize("seq_len", [1, 2, 17, 131])
def test_outputs_states_and_gradients_equal_the_sequential_ones(seq_len, chunk_size):
    assert_same(make_inputs(seq_len), 1e-12, 1e-10, chunk_size=chunk_size)


@pytest.mark.parametrize("tiles", [1, 8, 12])
def test_blocks_of_chunks_may_be_cut_anywhere(tiles, monkeypatch):
    monkeypatch.setattr(chunks, "TILES_AT_ONCE", tiles)
    assert_same(make_inputs(45), 1e-12, 1e-10, chunk_size=8)


@pytest.mark.parametrize("absent", ["log_decay", "initial_state", "log_decay initial_state"])
def test_optional_inputs_may_be_absent(absent):
    inputs = {**make_inputs(37), **dict.fromkeys(absent.split())}
    assert_same(inputs, 1e-12, 1e-10, chunk_size=16)


@settings(max_examples=25, deadline=None)
@given(
    seq_len=st.sampled_from([1, 2, 3, 5, 7, 13, 31, 37, 61]),
    chunk_size=st.sampled_from([2, 4, 16, 32]),
    heads=st.integers(1, 3),
    key_dim=st.integers(1, 6),
    value_dim=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_any_shape(seq_len, chunk_size, heads, key_dim, value_dim, seed):
    sizes = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim, "seed": seed}
    inputs = make_inputs(seq_len, batch=1, **sizes)
    assert_same(inputs, 1e-11, 1e-9, chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "grad_tolerance"),
    [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 5e-3, 1e-2), (torch.float16, 5e-3, 1e-2)],
)
def test_narrow_dtypes(dtype, tolerance, grad_tolerance):
    assert_same(make_inputs(100, key_dim=16, value_dim=16, dtype=dtype), tolerance, grad_tolerance)


def test_mixed_dtypes_keep_each_its_own():
    inputs = make_inputs(20, dtype=torch.bfloat16)
    inputs["log_decay"] = inputs["log_decay"].detach().float().requires_grad_()
    inputs["initial_state"] = inputs["initial_state"].detach().float().requires_grad_()
    found = run(delta_rule, inputs, output_final_state=True)
    assert found["out"].dtype == torch.bfloat16
    assert found["state"].dtype == torch.float32
    assert all(found[n].dtype == inputs[n].dtype for n in NAMES)


def test_autocast_does_not_reach_the_sums():
    inputs = make_inputs(40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(delta_rule, inputs, output_final_state=True)
    expected = run(delta_rule, inputs, output_final_state=True)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)


@pytest.mark.parametrize("chunk_size", [2, 4])
def test_gradcheck(chunk_size):
    inputs = make_inputs(5, batch=1, heads=2, key_dim=3, value_dim=2)

    def op(*given):
        return delta_rule(
            **dict(zip(NAMES, given, strict=True)), output_final_state=True, chunk_size=chunk_size
        )

    assert torch.autograd.gradcheck(op, tuple(inputs.values()))


@pytest.mark.parametrize("gate", [0.0, -1e-6, -50.0, -1e4, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_gates(gate, dtype):
    inputs = make_inputs(50, dtype=dtype)
    gates = inputs["log_decay"].detach().clone()
    gates[:, ::3] = gate
    inputs["log_decay"] = gates.requires_grad_()
    limits = (1e-12, 1e-10) if dtype == torch.float64 else (1e-5, 1e-4)
    if gate == -math.inf:  # the sequential gradient is 0 * inf there
        found = run(delta_rule, inputs, output_final_state=True, chunk_size=16)
        assert all(x.isfinite().all() for x in found.values())
        assert (found["log_decay"][:, ::3] == 0).all()
    else:
        assert_same(inputs, *limits, chunk_size=16)


@pytest.mark.parametrize("gate", [-1e-3, -1.0, -5.0, -10.0, -20.0])
def test_gradients_of_constant_gates_keep_their_digits(gate):
    grads = []
    for dtype in (torch.float32, torch.float64):
        inputs = make_inputs(1000, batch=1, key_dim=8, dtype=torch.float32)
        inputs = {n: x.detach().to(dtype).requires_grad_() for n, x in inputs.items()}
        inputs["log_decay"].data.fill_(gate)
        out, _ = delta_rule(**inputs)
        grads.append(torch.autograd.grad(out.square().sum(), inputs["log_decay"])[0])
    assert error(*grads) <= 1e-4
    assert error(*(grad.sum(1) for grad in grads)) <= 1e-4


def test_a_gate_of_minus_infinity_starts_again():
    inputs = make_inputs(40)
    inputs["log_decay"].data[:, 21] = -math.inf
    out, state = delta_rule(**inputs, output_final_state=True, chunk_size=8)
    later = {n: x[:, 21:] for n, x in inputs.items() if n != "initial_state"}
    later["log_decay"] = later["log_decay"].nan_to_num(neginf=0.0)
    again, last = delta_rule(**later, output_final_state=True, chunk_size=8)
    torch.testing.assert_close(out[:, 21:], again, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_a_token_with_beta_and_log_decay_zero_changes_nothing():
    inputs = make_inputs(30)
    at = [0, 7, 8, 29]
    for name in ("beta", "log_decay"):
        inputs[name].data[:, at] = 0.0
    keep = [t for t in range(30) if t not in at]
    rest = {n: x if n == "initial_state" else x[:, keep] for n, x in inputs.items()}
    out, state = delta_rule(**inputs, output_final_state=True, chunk_size=8)
    short, last = delta_rule(**rest, output_final_state=True, chunk_size=8)
    torch.testing.assert_close(out[:, keep], short, rtol=0, atol=1e-13)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-13)
    idle = {n: x if n == "initial_state" else x[:, at] for n, x in inputs.items()}
    _, still = delta_rule(**idle, output_final_state=True)
    assert torch.equal(still, inputs["initial_state"])


def test_decay_one_is_deltanet():
    inputs = make_inputs(70)
    inputs["log_decay"] = torch.zeros_like(inputs["log_decay"])
    gated = delta_rule(**inputs, output_final_state=True)
    plain = delta_rule(**{**inputs, "log_decay": None}, output_final_state=True)
    assert all(torch.equal(x, y) for x, y in zip(gated, plain, strict=True))


def test_equal_keys_do_not_blow_up():
    inputs = make_inputs(64, dtype=torch.float32, key_dim=8)
    inputs["k"] = torch.full_like(inputs["k"], 8**-0.5).requires_grad_()
    inputs["beta"] = torch.ones_like(inputs["beta"]).requires_grad_()
    inputs["log_decay"] = torch.zeros_like(inputs["log_decay"]).requires_grad_()
    assert_same(inputs, 1e-5, 1e-4)


@pytest.mark.parametrize("split", [1, 15, 16, 17, 36])
def test_a_sequence_may_be_continued_anywhere(split):
    inputs = make_inputs(37)
    whole, last = delta_rule(**inputs, output_final_state=True, chunk_size=16)
    head = {n: x if n == "initial_state" else x[:, :split] for n, x in inputs.items()}
    tail = {n: x[:, split:] for n, x in inputs.items() if n != "initial_state"}
    first, state = delta_rule(**head, output_final_state=True, chunk_size=16)
    outputs = [first]
    for t in range(37 - split):
        out, state = delta_rule_step(**{n: x[:, t] for n, x in tail.items()}, state=state)
        outputs.append(out.unsqueeze(1))
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=0, atol=1e-12)


def test_fresh_memory_is_written_before_it_is_read():
    inputs = make_inputs(37)
    torch.use_deterministic_algorithms(True)  # fills empty tensors with NaN
    try:
        assert_same(inputs, 1e-12, 1e-10, chunk_size=16)
    finally:
        torch.use_deterministic_algorithms(False)


def test_backward_keeps_the_inputs_and_one_state_a_chunk():
    inputs = make_inputs(256, batch=1)
    kept = []

    def count(x):
        kept.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        delta_rule(**inputs, chunk_size=16)
    states = (256 // 16 + 1) * inputs["initial_state"].numel()
    assert sum(kept) <= sum(x.numel() for x in inputs.values()) + states


def test_without_gradients_no_states_are_kept_and_nothing_changes():
    inputs = make_inputs(70)
    expected = delta_rule(**inputs, output_final_state=True, chunk_size=2)
    with torch.no_grad():
        found = delta_rule(**inputs, output_final_state=True, chunk_size=2)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# torch.compile itself makes an object of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_whole_and_for_any_length():
    def loss(inputs):
        out, state = delta_rule(**inputs, output_final_state=True, chunk_size=16)
        return out.square().sum() + state.sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq_len in (20, 33, 50):
        inputs = make_inputs(seq_len)
        found = torch.autograd.grad(compiled(inputs), list(inputs.values()))
        expected = torch.autograd.grad(loss(inputs), list(inputs.values()))
        for name, x, y in zip(NAMES, found, expected, strict=True):
            torch.testing.assert_close(x, y, msg=name)


def test_the_operator_is_registered_rightly():
    given = [x.detach() for x in make_inputs(9).values()]
    torch.library.opcheck(_forward, (given, 1.0, 4, True))


@pytest.mark.parametrize("seq_len", [1, 50, 130])
@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_equals_transformers(form, seq_len):
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    op = inspect.unwrap(getattr(module, f"torch_{form}_gated_delta_rule"))
    inputs = make_inputs(seq_len, key_dim=16, value_dim=8, dtype=torch.float32)
    q, k, v, beta, log_decay, initial = inputs.values()
    out, state = op(q, k, v, g=log_decay, beta=beta, initial_state=initial, output_final_state=True)
    found, last = delta_rule(**inputs, output_final_state=True)
    assert error(found, out) <= 1e-5
    assert error(last, state) <= 1e-5
    wanted = list(inputs.values())
    expected = torch.autograd.grad(out.square().sum() + state.sum(), wanted)
    grads = torch.autograd.grad(found.square().sum() + last.sum(), wanted)
    for label, x, y in zip(inputs, grads, expected, strict=True):
        assert error(x, y) <= 1e-4, label


def test_equals_flash_linear_attention():
    gated = pytest.importorskip("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
    plain = pytest.importorskip("fla.ops.delta_rule.naive").delta_rule_recurrence
    inputs = make_inputs(70, key_dim=16, value_dim=8, dtype=torch.float32)
    q, k, v, beta, log_decay, initial = (x.detach() for x in inputs.values())
    expected = gated(q, k, v, beta, log_decay, initial_state=initial, output_final_state=True)
    found = delta_rule(q, k, v, beta, log_decay, initial_state=initial, output_final_state=True)
    assert max(map(error, found, expected)) <= 1e-5
    by_head = (x.transpose(1, 2) for x in (q, k, v, beta))
    out, state = plain(*by_head, initial_state=initial)
    found = delta_rule(q, k, v, beta, initial_state=initial, output_final_state=True)
    assert max(map(error, found, (out.transpose(1, 2), state))) <= 1e-5


def test_transforms_of_torch_func():
    def loss(given):
        return delta_rule(**given, chunk_size=4)[0].square().sum()

    assert_transforms(loss, make_inputs(10))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_has_no_derivative_says_so():
    inputs = make_inputs(10)

    def loss(q):
        return delta_rule(**{**inputs, "q": q}, chunk_size=4)[0].square().sum()

    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(loss, (inputs["q"],), (inputs["q"],))
    (grad,) = torch.autograd.grad(loss(inputs["q"]), inputs["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.sum().backward()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_nothing_raises(value):
    for name in NAMES:
        inputs = make_inputs(10)
        if name == "log_decay" and not math.isnan(value):
            continue  # -inf forgets, inf is refused
        inputs[name].data[0, ..., 1] = value
        out, _ = delta_rule(**inputs, chunk_size=4)
        grads = torch.autograd.grad(out.sum(), list(inputs.values()))
        assert not out.isfinite().all(), name
        assert not all(x.isfinite().all() for x in grads), name
        assert out[1:].isfinite().all(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.ones(2, 9, 2, 4)}, r"\(2, 9, 2, 4\).*\(2, 9, 2, 5\)"),
        ({"v": torch.ones(2, 8, 2, 4)}, r"\(2, 8, 2, 4\)"),
        ({"beta": torch.ones(2, 9)}, r"beta must be .*\(2, 9, 2\).*\(2, 9\)"),
        ({"log_decay": torch.full((2, 9, 2), 0.5)}, r"<= 0.*0\.5"),
        ({"initial_state": torch.ones(2, 2, 5, 5)}, r"\(2, 2, 5, 4\).*\(2, 2, 5, 5\)"),
        ({"chunk_size": 48}, "48"),
        ({"chunk_size": 1}, "1"),
    ],
)
def test_bad_input_is_refused_with_its_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        delta_rule(**{**make_inputs(9), **change})
