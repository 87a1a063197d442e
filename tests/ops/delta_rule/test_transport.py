"""Transported keys and queries against their definition, one transition after the other."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smat.ops.delta_rule import delta_rule, delta_rule_step, transport_keys, transport_queries
from smat.ops.delta_rule.reference import delta_rule_reference, transition_reference
from tests.ops.recurrent import error, grads_of


def make_inputs(seq_len, *, heads=2, key_dim=5, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (2, seq_len, heads)
    q, k = torch.randn(2, *shape, key_dim, generator=generator, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    beta, speed = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
    inputs = {"q": q, "k": k, "beta": beta, "log_decay": -speed}
    return {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}


def transport_keys_reference(k, beta, log_decay):
    """Carry every beta_j k_j through A_{j+1}, ..., A_n, one transition after the other."""
    carried = []
    for t in range(k.shape[1]):
        step = transition_reference(k, beta, log_decay, t)
        carried = [torch.einsum("bhkl,bhl->bhk", step, key) for key in carried]
        carried.append(beta[:, t, :, None] * k[:, t])
    return torch.stack(carried, 1)


def transport_queries_reference(q, k, beta, log_decay):
    """Carry every q_t back, K^-1/2 (A_t ... A_1)' q_t, and return A_T ... A_1 as well."""
    eye = torch.eye(k.shape[-1], dtype=k.dtype)
    start = eye.expand(k.shape[0], k.shape[2], *eye.shape)  # a state that is only multiplied
    return delta_rule_reference(q, k, 0 * k, beta, log_decay, initial_state=start)


def assert_keys_same(inputs, tolerance, grad_tolerance, **kwargs):
    inputs = {name: x for name, x in inputs.items() if name != "q"}
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    found, expected = transport_keys(**inputs, **kwargs), transport_keys_reference(**wide)
    assert error(found, expected) <= tolerance
    grads = grads_of([found], inputs)
    for name, grad in grads_of([expected], wide).items():
        assert error(grads[name], grad) <= grad_tolerance, name


def assert_queries_same(inputs, tolerance, grad_tolerance, **kwargs):
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    found = transport_queries(**inputs, output_final_transition=True, **kwargs)
    expected = transport_queries_reference(**wide)
    assert error(found[0], expected[0]) <= tolerance
    # A long product is small because it is a difference from the identity: its error is absolute.
    torch.testing.assert_close(found[1].double(), expected[1], rtol=0, atol=tolerance)
    grads = grads_of(found, inputs)
    for name, grad in grads_of(expected, wide).items():
        assert error(grads[name], grad) <= grad_tolerance, name


@pytest.mark.parametrize("chunk_size", [2, 8, 64])
@pytest.mark.parametrize("seq_len", [1, 2, 17, 65])
def test_keys_and_queries_equal_the_definition(seq_len, chunk_size):
    assert_keys_same(make_inputs(seq_len), 1e-12, 1e-10, chunk_size=chunk_size)
    assert_queries_same(make_inputs(seq_len), 1e-12, 1e-10, chunk_size=chunk_size)


@settings(max_examples=15, deadline=None)
@given(
    seq_len=st.sampled_from([1, 2, 3, 7, 13, 31, 41]),
    chunk_size=st.sampled_from([2, 4, 16, 32]),
    key_dim=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_any_shape(seq_len, chunk_size, key_dim, seed):
    inputs = make_inputs(seq_len, heads=1, key_dim=key_dim, seed=seed)
    assert_keys_same(inputs, 1e-11, 1e-9, chunk_size=chunk_size)
    assert_queries_same(inputs, 1e-11, 1e-9, chunk_size=chunk_size)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "grad_tolerance"),
    [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 1e-2, 2e-2)],
)
def test_narrow_dtypes(dtype, tolerance, grad_tolerance):
    inputs = make_inputs(90, key_dim=16, dtype=dtype)
    assert_keys_same(inputs, tolerance, grad_tolerance)
    assert_queries_same(inputs, tolerance, grad_tolerance)


def test_gradcheck():
    inputs = make_inputs(5, heads=1, key_dim=3)
    k, beta, log_decay = list(inputs.values())[1:]
    assert torch.autograd.gradcheck(
        lambda *given: transport_keys(*given, chunk_size=2), (k, beta, log_decay)
    )
    start = torch.randn(2, 1, 3, 3, dtype=torch.float64, requires_grad=True)

    def queries(*given):
        return transport_queries(
            *given[:4], initial_transition=given[4], output_final_transition=True, chunk_size=2
        )

    assert torch.autograd.gradcheck(queries, (*inputs.values(), start))


def step_every_profile(k, v, beta, log_decay, profile, num_profiles):
    """Step every profile by A_j and let the chosen one receive beta_j k_j v_j', (B, H, P, K, V)."""
    table = k.new_zeros(len(k), k.shape[2], num_profiles, k.shape[3], v.shape[3])
    for t in range(k.shape[1]):
        table = transition_reference(k, beta, log_decay, t).unsqueeze(2) @ table
        chosen = torch.nn.functional.one_hot(profile[:, t], num_profiles).to(k.dtype)
        write = beta[:, t, :, None] * k[:, t]
        table = table + torch.einsum("bhp,bhk,bhv->bhpkv", chosen, write, v[:, t])
    return table


@pytest.mark.parametrize("with_decay", [True, False])
def test_pooled_keys_are_the_memory_whose_every_profile_is_stepped(with_decay):
    num_profiles = 4
    inputs = make_inputs(37)
    v = torch.randn(2, 37, 2, 3, dtype=torch.float64, requires_grad=True)
    profile = torch.randint(num_profiles, (2, 37, 2))
    given = {name: inputs[name] for name in ("k", "beta", "log_decay")}
    if not with_decay:
        given["log_decay"] = None
    expected = step_every_profile(v=v, profile=profile, num_profiles=num_profiles, **given)
    keys = transport_keys(**given, chunk_size=8)
    chosen = torch.nn.functional.one_hot(profile, num_profiles).to(v)
    table = torch.einsum("bthp,bthk,bthv->bhpkv", chosen, keys, v)
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-12)
    wanted = {"v": v, **{name: x for name, x in given.items() if x is not None}}
    grads = grads_of([table], wanted)
    for name, grad in grads_of([expected], wanted).items():
        assert error(grads[name], grad) <= 1e-10, name


def test_one_profile_carried_over_the_boundary_is_the_delta_rule():
    inputs, boundary = make_inputs(60), 23
    v = torch.randn(2, 60, 2, 3, dtype=torch.float64)
    whole, _ = delta_rule_reference(v=v, **inputs)
    distant = {n: x[:, :boundary] for n, x in inputs.items()}
    recent = {n: x[:, boundary:] for n, x in inputs.items()}
    keys = transport_keys(distant["k"], distant["beta"], distant["log_decay"], chunk_size=8)
    memory = torch.einsum("bthk,bthv->bhkv", keys, v[:, :boundary])
    queries, _ = transport_queries(**recent, chunk_size=8)
    local, _ = delta_rule(v=v[:, boundary:], **recent, chunk_size=8)
    total = local + torch.einsum("bthk,bhkv->bthv", queries, memory)
    torch.testing.assert_close(total, whole[:, boundary:], rtol=0, atol=1e-12)


def test_queries_may_be_continued_token_by_token():
    inputs = make_inputs(20)
    whole, product = transport_queries(**inputs, output_final_transition=True, chunk_size=8)
    head = {n: x[:, :9] for n, x in inputs.items()}
    first, transition = transport_queries(**head, output_final_transition=True, chunk_size=8)
    middle = {n: x[:, 9:14] for n, x in inputs.items()}
    second, transition = transport_queries(
        **middle, initial_transition=transition, output_final_transition=True, chunk_size=4
    )
    outputs = [first, second]
    nothing = torch.zeros(2, 2, 5, dtype=torch.float64)
    for t in range(14, 20):
        token = {n: x[:, t] for n, x in inputs.items()}
        query, transition = delta_rule_step(**token, v=nothing, state=transition)
        outputs.append(query.unsqueeze(1))
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=0, atol=1e-13)
    torch.testing.assert_close(transition, product, rtol=0, atol=1e-13)


def test_a_full_reset_cuts_what_lies_before_it():
    inputs = make_inputs(20)
    inputs["log_decay"].data[:, 12] = -math.inf
    k, beta, log_decay = (inputs[n] for n in ("k", "beta", "log_decay"))
    keys = transport_keys(k, beta, log_decay, chunk_size=8)
    assert (keys[:, :12] == 0).all()
    expected = transport_keys(k[:, 12:], beta[:, 12:], log_decay[:, 12:], chunk_size=8)
    torch.testing.assert_close(keys[:, 12:], expected, rtol=0, atol=1e-13)
    grads = torch.autograd.grad(keys.sum(), [k, beta, log_decay])
    assert all(x.isfinite().all() for x in grads)


def test_idle_tokens_transport_nothing_and_write_nothing():
    inputs = make_inputs(12)
    for name in ("beta", "log_decay"):
        inputs[name].data[:, 5:8] = 0.0
    keep = [0, 1, 2, 3, 4, 8, 9, 10, 11]
    k, beta, log_decay = (inputs[n] for n in ("k", "beta", "log_decay"))
    keys = transport_keys(k, beta, log_decay)
    expected = transport_keys(k[:, keep], beta[:, keep], log_decay[:, keep])
    torch.testing.assert_close(keys[:, keep], expected, rtol=0, atol=1e-14)
    assert (keys[:, 5:8] == 0).all()


# torch.compile itself makes an object of torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_whole_and_for_any_length():
    def loss(q, k, beta, log_decay):
        keys = transport_keys(k, beta, log_decay, chunk_size=16)
        queries, _ = transport_queries(q, k, beta, log_decay, chunk_size=16)
        return keys.square().sum() + queries.square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq_len in (24, 37):
        inputs = make_inputs(seq_len)
        found = torch.autograd.grad(compiled(**inputs), list(inputs.values()))
        expected = torch.autograd.grad(loss(**inputs), list(inputs.values()))
        for name, x, y in zip(inputs, found, expected, strict=True):
            torch.testing.assert_close(x, y, msg=name)


def test_bad_input_is_refused_with_its_numbers():
    inputs = make_inputs(4)
    with pytest.raises(ValueError, match=r"\(2, 2, 5, 5\).*\(2, 2, 5, 4\)"):
        transport_queries(**inputs, initial_transition=torch.ones(2, 2, 5, 4))
    with pytest.raises(ValueError, match="24"):
        transport_keys(inputs["k"], inputs["beta"], chunk_size=24)
