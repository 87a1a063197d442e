"""What the op must be in special cases: linear attention, no decay, one boundary, nothing seen."""

import pytest
import torch

import smat
from smat.ops.backend import available_backends
from tests.ops.smat.comparison import (
    attend,
    attend_densely,
    gradients,
    leaves,
    make_inputs,
    mild_gates,
    mixed_gates,
    poisoned_memory,
    relative_rms,
    small_blocks,
)

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")

SCHEDULES = [
    None,
    smat.schedules.none(),
    smat.schedules.kept(19),
    smat.schedules.doubling(),
    smat.schedules.window(7),
]


def assert_same(first, second, tolerance=1e-12):
    """Compare two runs, output and gradients."""
    assert relative_rms(first[0], second[0]) <= tolerance
    for name, grad in second[1].items():
        assert relative_rms(first[1][name], grad) <= 100 * tolerance, name


def linear_attention(q, k, v):
    """Write causal linear attention as its recurrence, one state for each head."""
    phi, psi = torch.nn.functional.elu(q) + 1, torch.nn.functional.elu(k) + 1
    state = torch.einsum("bthr,bthv->bthrv", psi, v).cumsum(1)
    total = torch.einsum("bthr,bthr->bth", phi, psi.cumsum(1))
    return torch.einsum("bthr,bthrv->bthv", phi, state) / total.unsqueeze(-1)


@pytest.mark.parametrize("boundary", SCHEDULES, ids=str)
def test_one_dimension_is_linear_attention(boundary):
    inputs = make_inputs(67)
    own = leaves(inputs)
    expected = linear_attention(**own)
    found = attend(inputs, smat.SMatMask(67, 1, 8, boundary=boundary))
    assert_same(found, (expected.detach(), gradients(expected, own)))


@pytest.mark.parametrize("vc_dim", [2, 3, 4])
def test_without_distant_keys_every_dimension_is_linear_attention(vc_dim):
    inputs = make_inputs(50)
    mask = smat.SMatMask(50, vc_dim, 8, boundary=smat.schedules.none())
    assert relative_rms(attend(inputs, mask)[0], linear_attention(**inputs)) <= 1e-12
    short = smat.SMatMask(50, vc_dim, chunk_size=64)  # too short for a distant chunk
    assert relative_rms(attend(inputs, short)[0], linear_attention(**inputs)) <= 1e-12


@pytest.mark.parametrize("boundary", SCHEDULES, ids=str)
def test_decay_of_zero_is_no_decay(boundary):
    inputs, mask = make_inputs(75), smat.SMatMask(75, 3, 8, boundary=boundary)
    gated = attend(inputs | {"log_decay": torch.zeros(2, 75, 2, dtype=torch.float64)}, mask)
    assert_same(gated, attend(inputs, mask))


@pytest.mark.parametrize("name", ["key_gate", "write_weight"])
def test_gates_of_one_change_nothing(name):
    inputs, mask = make_inputs(75), smat.SMatMask(75, 3, 8)
    gated = attend(inputs | {name: torch.ones(2, 75, 2, dtype=torch.float64)}, mask)
    assert_same(gated, attend(inputs, mask))


@pytest.mark.parametrize("vc_dim", [2, 3, 4])
def test_a_boundary_kept_where_it_was_is_the_fixed_mask(vc_dim):
    inputs = make_inputs(75) | {"log_decay": mild_gates((2, 75, 2))}
    fixed = smat.SMatMask(75, vc_dim, 8)
    still = smat.SMatMask(75, vc_dim, 8, boundary=smat.schedules.kept(fixed.num_distant))
    assert fixed.num_distant > 0
    assert_same(attend(inputs, still), attend(inputs, fixed), tolerance=0.0)


def test_positional_routing_given_by_hand_changes_nothing():
    inputs, mask = make_inputs(90), smat.SMatMask(90, 3, 8, boundary=smat.schedules.window(16))
    position = torch.arange(90)
    by_hand = {
        "profile": mask.profile(position).view(1, -1, 1).expand(2, -1, 2),
        "query_type": mask.query_type(position).view(1, -1, 1).expand(2, -1, 2),
    }
    assert_same(attend(inputs | by_hand, mask), attend(inputs, mask))


def test_full_reset_forgets_everything_before_it():
    inputs, mask = make_inputs(60), smat.SMatMask(60, 3, 8)
    gates = torch.zeros(2, 60, 2, dtype=torch.float64)
    gates[:, 45] = -torch.inf
    out, grads = attend(inputs | {"log_decay": gates}, mask)
    changed = {name: x.clone() for name, x in inputs.items()}
    changed["v"][:, :45] += 1
    again, _ = attend(changed | {"log_decay": gates}, mask)
    assert torch.equal(out[:, 45:], again[:, 45:])
    assert all(grad.isfinite().all() for grad in grads.values())
    assert not grads["log_decay"][:, 45].any()


@pytest.mark.parametrize("boundary", SCHEDULES, ids=str)
def test_no_output_depends_on_a_later_token(boundary):
    inputs = make_inputs(48) | {"log_decay": mild_gates((2, 48, 2))}
    mask = smat.SMatMask(48, 3, 8, boundary=boundary)
    out, _ = attend(inputs, mask)
    for token in (0, 1, 7, 8, 23, 24, 25, 40, 47):
        later = {name: x.clone() for name, x in inputs.items()}
        for name, x in later.items():
            x[:, token] = -3.0 if name == "log_decay" else 5.0
        assert torch.equal(attend(later, mask)[0][:, :token], out[:, :token])
        assert not torch.equal(attend(later, mask)[0][:, token], out[:, token])


@pytest.mark.parametrize("content", [False, True])
def test_deterministic_to_the_last_bit(content):
    mask = smat.SMatMask(150, 3, 8, boundary=smat.schedules.window(16))
    inputs = make_inputs(150, dtype=torch.float32)
    inputs["log_decay"] = mild_gates((2, 150, 2)).float()
    if content:
        inputs["profile"] = torch.randint(mask.geometry.num_profiles, (2, 150, 2))
        inputs["query_type"] = torch.randint(mask.geometry.num_types, (2, 150, 2))
    first, second = attend(inputs, mask), attend(inputs, mask)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


def test_a_prompt_gets_the_leading_block_of_the_horizon():
    mask, inputs = smat.SMatMask(120, 3, 8), make_inputs(120)
    whole, _ = attend(inputs, mask)
    for length in (1, 30, mask.num_distant, 61, 119):
        prompt = {name: x[:, :length] for name, x in inputs.items()}
        assert relative_rms(attend(prompt, mask)[0], whole[:, :length]) <= 1e-12


def test_positions_are_rows_of_the_whole():
    mask = smat.SMatMask(150, 3, 8)
    inputs = make_inputs(150, group=2) | {"log_decay": mild_gates((2, 150, 2))}
    rows = torch.tensor([149, 0, 77, 76, 75, 74, 0, 3], dtype=torch.int32)
    whole, _ = attend(inputs, mask)
    some, _ = attend(inputs, mask, positions=rows)
    assert relative_rms(some, whole[:, rows.long()]) <= 1e-12
    none, grads = attend(inputs, mask, positions=rows[:0])
    assert none.shape == (2, 0, 4, 3)
    assert not any(grad.any() for grad in grads.values())


def test_grouped_heads_equal_repeated_keys():
    mask, inputs = smat.SMatMask(70, 3, 8), make_inputs(70, heads=2, group=3)
    repeated = {name: x if name == "q" else x.repeat_interleave(3, 2) for name, x in inputs.items()}
    out, grads = attend(inputs, mask)
    out_repeated, grads_repeated = attend(repeated, mask)
    assert relative_rms(out, out_repeated) <= 1e-12
    for name in ("k", "v"):
        summed = grads_repeated[name].unflatten(2, (2, 3)).sum(3)
        assert relative_rms(grads[name], summed) <= 1e-10


@pytest.mark.parametrize("gated", [False, True])
def test_heads_that_share_queries_and_keys_equal_repeated_ones(gated):
    mask, inputs = smat.SMatMask(70, 3, 8), make_inputs(70, heads=2, group=3, sharing="values")
    if gated:
        inputs["log_decay"] = mild_gates((2, 70, 6))
    repeated = {
        name: x.repeat_interleave(3, 2) if name in ("q", "k") else x for name, x in inputs.items()
    }
    out, grads = attend(inputs, mask)
    out_repeated, grads_repeated = attend(repeated, mask)
    assert relative_rms(out, out_repeated) <= 1e-12
    for name, grad in grads.items():
        expected = grads_repeated[name]
        if name in ("q", "k"):
            expected = expected.unflatten(2, (2, 3)).sum(3)
        assert relative_rms(grad, expected) <= 1e-10


def test_many_heads_in_many_shares_add_to_one_gradient_without_rounding():
    inputs = make_inputs(40, heads=1, group=48, sharing="values", dtype=torch.bfloat16)
    inputs["v"] = inputs["v"].abs()  # so that the heads' gradients do not cancel
    weights = torch.ones(2, 40, 48, 3)
    mask = smat.SMatMask(40, 3, 8)
    with small_blocks(tokens=40):  # one head a share
        own = leaves(inputs)
        out, _ = smat.smat_attention(mask=mask, **own, normalize=False)
        grads = torch.autograd.grad(out, [own["q"], own["k"]], weights.to(out.dtype))
    exact = leaves(inputs, torch.float64)
    dense = smat.reference_attention(mask=mask, **exact, normalize=False)
    expected = torch.autograd.grad(dense, [exact["q"], exact["k"]], weights.double())
    for grad, true in zip(grads, expected, strict=True):
        assert relative_rms(grad, true) <= 4e-3  # a rounding of the sum, not one for each head


def test_strided_inputs_and_gradients():
    mask = smat.SMatMask(70, 3, 8)
    inputs = make_inputs(70)
    strided = {name: x.permute(3, 2, 0, 1).contiguous() for name, x in inputs.items()}
    strided = {name: x.permute(2, 3, 1, 0) for name, x in strided.items()}
    assert not strided["q"].is_contiguous()
    assert_same(attend(strided, mask), attend(inputs, mask), tolerance=0.0)
    own = leaves(inputs)
    with poisoned_memory():
        out, _ = smat.smat_attention(mask=mask, **own)
        summed = torch.autograd.grad(out.sum(), own["v"])[0]  # the gradient of out has stride 0
    reference = smat.reference_attention(mask=mask, **own)
    assert relative_rms(summed, torch.autograd.grad(reference.sum(), own["v"])[0]) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_sees_nothing_gives_zero(dtype):
    mask = smat.SMatMask(64, 3, 8)
    inputs = make_inputs(64, dtype=dtype)
    inputs["k"][:, :40] = -1  # relu leaves nothing of these keys
    inputs["q"][:, 50] = -1  # nor of this query
    out, grads = attend(inputs, mask, feature_map="relu")
    expected, _ = attend_densely(inputs, mask, feature_map="relu")
    assert not out[:, :40].any()
    assert not out[:, 50].any()
    assert out[:, 45:50].any()
    assert relative_rms(out, expected) <= {torch.float64: 1e-12}.get(dtype, 5e-3)
    assert all(grad.isfinite().all() for grad in grads.values())


def test_weights_that_underflow_give_zero_not_nan():
    inputs = {name: torch.ones(1, 6, 1, 2) for name in ("q", "k", "v")}
    inputs["v"][..., 1] = 0
    inputs["key_gate"] = torch.zeros(1, 6, 1)
    inputs["key_gate"][:, 0] = 1
    for gate in (-60.0, -88.0, -95.0, -103.0, -200.0, -torch.inf):
        inputs["log_decay"] = torch.tensor([0, gate, 0, 0, 0, 0]).view(1, 6, 1)
        out, grads = attend(inputs, smat.SMatMask(6, 2, 2, boundary=smat.schedules.none()))
        assert out.isfinite().all()
        assert all(grad.isfinite().all() for grad in grads.values())
        if gate >= -60:
            assert torch.equal(out[0, :, 0, 0], torch.ones(6))


@pytest.mark.parametrize(
    "boundary", [None, smat.schedules.window(3), smat.schedules.doubling()], ids=str
)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("content", [False, True])
def test_gradcheck(boundary, normalize, content):
    mask = smat.SMatMask(11, 3, 2, field_size=2, boundary=boundary)
    generator = torch.Generator().manual_seed(0)
    tensors = make_inputs(11, batch=1, heads=1, group=2, key_dim=2, value_dim=2)
    tensors["log_decay"] = mild_gates((1, 11, 1))
    for name in ("key_gate", "write_weight"):
        tensors[name] = 0.5 + torch.rand(1, 11, 1, generator=generator, dtype=torch.float64)
    routing = {}
    if content:
        routing["profile"] = torch.randint(4, (1, 11, 1), generator=generator)
        routing["query_type"] = torch.randint(6, (1, 11, 2), generator=generator)
    own = leaves(tensors)

    def run(*values):
        named = dict(zip(own, values, strict=True))
        return smat.smat_attention(mask=mask, normalize=normalize, **named, **routing)[0]

    with small_blocks(tile=2, tiles=2, tokens=8, table_bytes=1):
        assert torch.autograd.gradcheck(run, tuple(own.values()), fast_mode=True)


@pytest.mark.parametrize("backend", available_backends("cpu"))
def test_gradcheck_of_every_entry(backend):
    mask = smat.SMatMask(5, 2, 2, field_size=2, boundary=smat.schedules.window(1))
    own = leaves(make_inputs(5, batch=1, heads=1, key_dim=2, value_dim=1))
    own["log_decay"] = mild_gates((1, 5, 1)).requires_grad_()

    def run(q, k, v, log_decay):
        return smat.smat_attention(q, k, v, mask, log_decay=log_decay, backend=backend)[0]

    with small_blocks(tile=2, tiles=2):
        assert torch.autograd.gradcheck(run, tuple(own.values()))


@pytest.mark.parametrize("boundary", SCHEDULES, ids=str)
@pytest.mark.parametrize("vc_dim", [1, 3])
def test_the_branches_add_up(boundary, vc_dim):
    """What a query sees of its recent keys and of its distant keys, apart and together."""
    mask = smat.SMatMask(75, vc_dim, 8, boundary=boundary)
    inputs = make_inputs(75) | {"log_decay": mild_gates((2, 75, 2))}
    both, causal, long_range = (
        attend(inputs, mask, normalize=False, branch=branch)
        for branch in ("both", "causal", "long_range")
    )
    grads = {name: causal[1][name] + long_range[1][name] for name in both[1]}
    assert_same(both, (causal[0] + long_range[0], grads))
    first = mask.boundaries().nonzero()[:1].flatten().tolist() or [75]
    assert not long_range[0][:, : first[0]].any()


def test_gradients_only_where_they_are_asked_for():
    mask, inputs = smat.SMatMask(40, 3, 4), make_inputs(40)
    gates = mixed_gates((2, 40, 2)).requires_grad_()
    out, state = smat.smat_attention(mask=mask, log_decay=gates, **inputs)
    assert state is None
    (grad,) = torch.autograd.grad(out.sum(), gates)
    assert grad.isfinite().all()
    with torch.no_grad():
        assert not smat.smat_attention(mask=mask, log_decay=gates, **inputs)[0].requires_grad
    with torch.inference_mode():
        inferred, _ = smat.smat_attention(mask=mask, log_decay=gates, **inputs)
    assert torch.equal(inferred, out)
