"""Log-linear attention against its definition, its plain backbones and fla's dense form."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smat.ops.delta_rule import chunks, delta_rule
from smat.ops.log_linear import (
    LogLinearState,
    log_linear_attention,
    log_linear_delta_rule,
    log_linear_step,
)
from smat.ops.log_linear.log_linear import _forward
from smat.ops.log_linear.reference import decay_reference, log_linear_reference
from tests.ops.recurrent import assert_transforms, error, grads_of

FORMS = {"decay": log_linear_attention, "delta": log_linear_delta_rule}
each_form = pytest.mark.parametrize("form", FORMS)


def make_inputs(
    form, seq_len, *, levels=8, heads=2, key_dim=5, value_dim=4, dtype=torch.float64, seed=0
):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, seq_len, heads)
    q, k = torch.randn(2, *shape, key_dim, generator=generator, dtype=torch.float64)
    inputs = {
        "q": q,
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": torch.randn(*shape, value_dim, generator=generator, dtype=torch.float64),
        "level_weights": torch.rand(*shape, levels, generator=generator, dtype=torch.float64),
        "log_decay": -torch.rand(shape, generator=generator, dtype=torch.float64) / 4,
    }
    if form == "delta":
        inputs["beta"] = torch.rand(shape, generator=generator, dtype=torch.float64)
    return {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}


def assert_same(form, inputs, tolerance, grad_tolerance, **kwargs):
    found, _ = FORMS[form](**inputs, **kwargs)
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected = log_linear_reference(**wide)
    assert error(found, expected) <= tolerance
    grads = grads_of([found], inputs)
    for name, grad in grads_of([expected], wide).items():
        assert error(grads[name], grad) <= grad_tolerance, name


def step_through(inputs, state, tokens):
    outputs = []
    for t in tokens:
        out, state = log_linear_step(**{n: x[:, t] for n, x in inputs.items()}, state=state)
        outputs.append(out)
    return outputs, state


@each_form
@pytest.mark.parametrize("chunk_size", [2, 8, 64])
@pytest.mark.parametrize("seq_len", [1, 2, 17, 41, 64])
def test_outputs_and_gradients_equal_the_definition(form, seq_len, chunk_size):
    assert_same(form, make_inputs(form, seq_len), 1e-12, 1e-10, chunk_size=chunk_size)


@each_form
@pytest.mark.parametrize("tiles", [1, 3, 7])
def test_blocks_of_tiles_may_be_cut_anywhere(form, tiles, monkeypatch):
    monkeypatch.setattr(chunks, "TILES_AT_ONCE", tiles)
    assert_same(form, make_inputs(form, 23), 1e-12, 1e-10, chunk_size=4)


@each_form
@settings(max_examples=15, deadline=None)
@given(
    seq_len=st.sampled_from([1, 2, 3, 5, 13, 29, 37]),
    chunk_size=st.sampled_from([2, 4, 16, 32]),
    levels=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
def test_any_shape_and_any_number_of_levels(form, seq_len, chunk_size, levels, seed):
    inputs = make_inputs(form, seq_len, levels=levels, heads=1, key_dim=3, seed=seed)
    assert_same(form, inputs, 1e-11, 1e-9, chunk_size=chunk_size)


@each_form
@pytest.mark.parametrize(
    ("dtype", "tolerance", "grad_tolerance"),
    [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 5e-3, 1e-2)],
)
def test_narrow_dtypes(form, dtype, tolerance, grad_tolerance):
    inputs = make_inputs(form, 70, key_dim=8, dtype=dtype)
    assert_same(form, inputs, tolerance, grad_tolerance, chunk_size=16)


@each_form
def test_gradcheck(form):
    inputs = make_inputs(form, 5, levels=3, heads=1, key_dim=2, value_dim=2)

    def op(*given):
        out, state = FORMS[form](
            **dict(zip(inputs, given, strict=True)), output_final_state=True, chunk_size=2
        )
        return out, state.buckets

    assert torch.autograd.gradcheck(op, tuple(inputs.values()))


def test_with_all_weights_one_it_is_the_decaying_recurrence():
    inputs = make_inputs("decay", 70)
    inputs["level_weights"] = torch.ones_like(inputs["level_weights"])
    found, state = log_linear_attention(**inputs, output_final_state=True, chunk_size=8)
    del inputs["level_weights"]
    expected, last = decay_reference(**inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.buckets.sum(2), last, rtol=0, atol=1e-12)


def test_with_all_weights_one_it_is_the_delta_rule():
    inputs = make_inputs("delta", 70)
    inputs["level_weights"] = torch.ones_like(inputs["level_weights"])
    found, state = log_linear_delta_rule(**inputs, output_final_state=True, chunk_size=8)
    del inputs["level_weights"]
    expected, last = delta_rule(**inputs, scale=1.0, output_final_state=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(state.buckets.sum(2), last, rtol=0, atol=1e-12)


@each_form
def test_without_gates_nothing_decays(form):
    inputs = make_inputs(form, 30)
    inputs["log_decay"] = torch.zeros_like(inputs["log_decay"])
    gated, state = FORMS[form](**inputs, output_final_state=True)
    del inputs["log_decay"]
    plain, same = FORMS[form](**inputs, output_final_state=True)
    assert torch.equal(gated, plain)
    assert torch.equal(state.buckets, same.buckets)


@each_form
@pytest.mark.parametrize("gate", [-50.0, -1e4, -math.inf])
def test_extreme_gates(form, gate):
    inputs = make_inputs(form, 40)
    inputs["log_decay"].data[:, ::5] = gate
    if gate == -math.inf:  # the sequential gradient is 0 * inf there
        out, state = FORMS[form](**inputs, output_final_state=True, chunk_size=8)
        grads = grads_of([out, state.buckets], inputs)
        assert all(x.isfinite().all() for x in grads.values())
        assert error(out, log_linear_reference(**inputs)) <= 1e-12
    else:
        assert_same(form, inputs, 1e-12, 1e-10, chunk_size=8)


@each_form
@pytest.mark.parametrize("gate", [-1e-3, -1.0, -5.0, -10.0, -20.0])
def test_gradients_of_constant_gates_keep_their_digits(form, gate):
    grads = []
    for dtype in (torch.float32, torch.float64):
        inputs = make_inputs(form, 1000, levels=11, key_dim=8, dtype=torch.float32)
        inputs = {n: x.detach().to(dtype).requires_grad_() for n, x in inputs.items()}
        inputs["log_decay"].data.fill_(gate)
        out, _ = FORMS[form](**inputs)
        grads.append(torch.autograd.grad(out.square().sum(), inputs["log_decay"])[0])
    assert error(*grads) <= 1e-4
    assert error(*(grad.sum(1) for grad in grads)) <= 1e-4


@each_form
@pytest.mark.parametrize("levels", [1, 2, 4, 7])
def test_decoding_equals_the_whole_at_every_split(form, levels):
    seq_len = 21
    inputs = make_inputs(form, seq_len, levels=levels)
    whole, last = FORMS[form](**inputs, output_final_state=True, chunk_size=4)
    empty = LogLinearState.empty(2, 2, levels, 5, 4, dtype=torch.float64)
    for split in range(seq_len):
        state = empty
        if split:
            head = {n: x[:, :split] for n, x in inputs.items()}
            _, state = FORMS[form](**head, output_final_state=True, chunk_size=4)
        outputs, state = step_through(inputs, state, range(split, seq_len))
        torch.testing.assert_close(torch.stack(outputs, 1), whole[:, split:], rtol=0, atol=1e-12)
        torch.testing.assert_close(state.buckets, last.buckets, rtol=0, atol=1e-12)
        assert torch.equal(state.num_tokens, last.num_tokens)


@each_form
def test_rows_may_have_read_different_numbers_of_tokens(form):
    inputs = make_inputs(form, 12)
    rows = [{n: x[i : i + 1] for n, x in inputs.items()} for i in range(2)]
    heads = [
        {n: x[:, :stop] for n, x in row.items()} for row, stop in zip(rows, (3, 6), strict=True)
    ]
    states = [FORMS[form](**head, output_final_state=True)[1] for head in heads]
    joint = LogLinearState(*(torch.cat(x) for x in zip(*states, strict=True)))
    after = [{n: x[:, t:] for n, x in row.items()} for row, t in zip(rows, (3, 6), strict=True)]
    for t in range(6):
        token = {n: torch.cat([row[n][:, t] for row in after]) for n in inputs}
        out, joint = log_linear_step(**token, state=joint)
        for i, row in enumerate(after):
            expected, states[i] = log_linear_step(
                **{n: x[:, t] for n, x in row.items()}, state=states[i]
            )
            torch.testing.assert_close(out[i : i + 1], expected, rtol=0, atol=1e-14)


@each_form
@pytest.mark.parametrize("levels", [1, 3, 6])
def test_rows_of_different_lengths_end_in_their_own_states(form, levels):
    inputs = {n: x.detach().clone() for n, x in make_inputs(form, 13, levels=levels).items()}
    lengths = torch.tensor([7, 13])
    inputs["log_decay"][0, 7:] = 0.0
    if form == "delta":
        inputs["beta"][0, 7:] = 0.0
    _, state = FORMS[form](**inputs, output_final_state=True, lengths=lengths, chunk_size=4)
    assert torch.equal(state.num_tokens, lengths)
    for row, length in enumerate((7, 13)):
        alone = {n: x[row : row + 1, :length] for n, x in inputs.items()}
        _, expected = FORMS[form](**alone, output_final_state=True, chunk_size=4)
        found = state.buckets[row : row + 1]
        torch.testing.assert_close(found, expected.buckets, rtol=0, atol=1e-13)


def test_decoding_keeps_log_many_states():
    state = LogLinearState.empty(1, 1, num_levels=15, key_dim=2, value_dim=3)
    assert state.buckets.shape == (1, 1, 14, 2, 3)
    inputs = make_inputs("decay", 33, levels=15, heads=1, key_dim=2, value_dim=3)
    rows = {n: x[:1] for n, x in inputs.items()}
    _, state = step_through(rows, state, range(33))
    used = state.buckets.abs().sum((0, 1, 3, 4)) > 0
    assert used.nonzero().flatten().tolist() == [0, 5]  # 33 = 2^0 + 2^5


@each_form
def test_no_output_sees_a_later_token(form):
    inputs = {n: x.detach() for n, x in make_inputs(form, 40).items()}
    out, _ = FORMS[form](**inputs, chunk_size=8)
    changed = {n: x.clone() for n, x in inputs.items()}
    for x in changed.values():
        x[:, 21] *= 0.5
    again, _ = FORMS[form](**changed, chunk_size=8)
    torch.testing.assert_close(again[:, :21], out[:, :21], rtol=0, atol=1e-14)
    assert not torch.allclose(again[:, 21:], out[:, 21:])


@each_form
def test_fresh_memory_is_written_before_it_is_read(form):
    torch.use_deterministic_algorithms(True)  # fills empty tensors with NaN
    try:
        assert_same(form, make_inputs(form, 37), 1e-12, 1e-10, chunk_size=8)
    finally:
        torch.use_deterministic_algorithms(False)


@each_form
def test_autocast_does_not_reach_the_sums(form):
    inputs = make_inputs(form, 40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = FORMS[form](**inputs, chunk_size=8)
    assert torch.equal(found, FORMS[form](**inputs, chunk_size=8)[0])


# torch.compile itself makes an object of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@each_form
def test_compiles_whole_and_for_any_length(form):
    def loss(inputs):
        return FORMS[form](**inputs, chunk_size=8)[0].square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq_len in (20, 33):
        inputs = make_inputs(form, seq_len)
        found = torch.autograd.grad(compiled(inputs), list(inputs.values()))
        expected = torch.autograd.grad(loss(inputs), list(inputs.values()))
        for name, x, y in zip(inputs, found, expected, strict=True):
            torch.testing.assert_close(x, y, msg=name)


def test_a_step_compiles_once_for_every_token():
    inputs = make_inputs("delta", 9, levels=5)
    compiled = torch.compile(log_linear_step, fullgraph=True, backend="aot_eager")
    state = same = LogLinearState.empty(2, 2, 5, 5, 4, dtype=torch.float64)
    with torch.no_grad():
        for t in range(9):
            token = {n: x[:, t] for n, x in inputs.items()}
            out, state = log_linear_step(**token, state=state)
            with torch.compiler.set_stance("fail_on_recompile" if t else "default"):
                found, same = compiled(**token, state=same)
            torch.testing.assert_close(found, out)


@each_form
def test_the_operator_is_registered_rightly(form):
    inputs = make_inputs(form, 9)
    given = [inputs[n].detach() for n in ("q", "k", "v", "level_weights", "log_decay")]
    given += [inputs["beta"].detach()] if form == "delta" else []
    torch.library.opcheck(_forward, (given, 1.0, 4))


def test_equals_flash_linear_attention():
    dense = pytest.importorskip("fla.ops.log_linear_attn.naive").naive_log_linear_attn
    inputs = make_inputs("decay", 60, levels=7, dtype=torch.float32)
    q, k, v, weights, log_decay = inputs.values()
    expected = dense(q, k, v, log_decay, weights)
    found, _ = log_linear_attention(**inputs, chunk_size=16)
    assert error(found, expected) <= 1e-5
    grads = grads_of([found], inputs)
    for name, grad in grads_of([expected], inputs).items():
        assert error(grads[name], grad) <= 1e-4, name


def test_with_all_weights_one_it_equals_simple_gla():
    recurrent = pytest.importorskip("fla.ops.simple_gla.naive").naive_recurrent_simple_gla
    inputs = make_inputs("decay", 60, dtype=torch.float32)
    q, k, v, weights, log_decay = (x.detach() for x in inputs.values())
    expected, last = recurrent(q, k, v, log_decay)
    found, state = log_linear_attention(
        q, k, v, torch.ones_like(weights), log_decay, scale=5**-0.5, output_final_state=True
    )
    assert error(found, expected) <= 1e-5
    assert error(state.buckets.sum(2), last) <= 1e-5


@each_form
def test_transforms_of_torch_func(form):
    def loss(given):
        return FORMS[form](**given, chunk_size=4)[0].square().sum()

    assert_transforms(loss, make_inputs(form, 10, levels=4))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@each_form
def test_what_has_no_derivative_says_so(form):
    inputs = make_inputs(form, 10, levels=4)

    def loss(q):
        return FORMS[form](**{**inputs, "q": q}, chunk_size=4)[0].square().sum()

    with pytest.raises(NotImplementedError, match="forward mode"):
        torch.func.jvp(loss, (inputs["q"],), (inputs["q"],))
    (grad,) = torch.autograd.grad(loss(inputs["q"]), inputs["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        grad.sum().backward()


@each_form
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_nothing_raises(form, value):
    for name in make_inputs(form, 10, levels=4):
        inputs = make_inputs(form, 10, levels=4)
        if name == "log_decay" and not math.isnan(value):
            continue  # -inf forgets, inf is refused
        inputs[name].data[0, 5] = value
        out, _ = FORMS[form](**inputs, chunk_size=4)
        grads = torch.autograd.grad(out.sum(), list(inputs.values()))
        assert not out.isfinite().all(), name
        assert not all(x.isfinite().all() for x in grads), name
        assert out[1:].isfinite().all(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"v": torch.ones(2, 8, 2, 4)}, r"v must be .*\(2, 8, 2, 4\)"),
        ({"level_weights": torch.ones(2, 9, 2)}, r"level_weights must be .*\(2, 9, 2\)"),
        ({"log_decay": torch.full((2, 9, 2), 0.25)}, r"<= 0.*0\.25"),
        ({"chunk_size": 12}, "12"),
    ],
)
def test_bad_input_is_refused_with_its_numbers(change, message):
    with pytest.raises(ValueError, match=message):
        log_linear_attention(**{**make_inputs("decay", 9), **change})
