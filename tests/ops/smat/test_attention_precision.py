"""Half precision: sums stay wide, inputs of several dtypes mix, autocast changes nothing."""

import pytest
import torch

import smat
from tests.ops.smat.comparison import (
    assert_matches_oracle,
    attend,
    attend_densely,
    gradients,
    leaves,
    make_inputs,
    mild_gates,
    relative_rms,
)

HALF = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("strength", [0.01, 1.0, 8.0])
def test_half_precision_gradients_under_any_decay(dtype, strength):
    """Strong decay leaves q little gradient, which a rounded output would drown."""
    inputs = make_inputs(300, dtype=dtype)
    inputs["log_decay"] = (torch.full((2, 300, 2), -strength)).to(dtype)
    assert_matches_oracle(inputs, smat.SMatMask(300, 3, 16, field_size=5))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_sums_do_not_stop_growing(dtype):
    """Adding ones one by one in half precision would stop at 256 or 2048."""
    ones = torch.ones(1, 4096, 1, 1, dtype=dtype)
    out, _ = smat.smat_attention(
        ones, ones, ones, smat.SMatMask(4096, 2), normalize=False, feature_map="identity"
    )
    expected = smat.SMatMask(4096, 2).dense().sum(1)
    assert torch.equal(out.flatten(), expected.to(dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gates_may_be_wider_than_values(dtype):
    mask = smat.SMatMask(80, 3, 8, field_size=3)
    inputs = make_inputs(80, dtype=dtype)
    gates = {"log_decay": mild_gates((2, 80, 2)), "key_gate": mild_gates((2, 80, 2)).neg()}
    gates = {name: gate.float() for name, gate in gates.items()}
    out, grads = attend(inputs | gates, mask)
    expected, _ = attend_densely(inputs | gates, mask)
    assert out.dtype == dtype
    assert grads["log_decay"].dtype == torch.float32
    assert relative_rms(out, expected) <= 5e-3


@pytest.mark.parametrize("feature_map", ["elu", "favor"])
@pytest.mark.parametrize("content", [False, True])
def test_autocast_does_not_touch_the_sums(feature_map, content):
    mask = smat.SMatMask(200, 3, 16, field_size=5)
    inputs = make_inputs(200, dtype=torch.float32, key_dim=16, value_dim=16)
    inputs["log_decay"] = mild_gates((2, 200, 2)).float()
    if content:
        inputs["profile"] = torch.randint(25, (2, 200, 2))
        inputs["query_type"] = torch.randint(30, (2, 200, 2))
    own = leaves(inputs)
    plain, _ = smat.smat_attention(mask=mask, feature_map=feature_map, **own)
    with torch.autocast("cpu", torch.bfloat16):
        cast, _ = smat.smat_attention(mask=mask, feature_map=feature_map, **own)
        cast_grads = gradients(cast, own) if feature_map == "elu" else None
    assert cast.dtype == torch.float32
    assert torch.equal(cast, plain)
    grads = gradients(plain, own)
    for name, grad in (cast_grads or gradients(cast, own)).items():
        assert torch.equal(grad, grads[name]), name


def test_autocast_of_half_precision_projections():
    """A layer under autocast hands over bf16 queries, keys and values, and wide gates."""
    mask = smat.SMatMask(64, 2, 8)
    inputs = leaves(make_inputs(64, dtype=torch.bfloat16))
    gates = mild_gates((2, 64, 2)).float()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = smat.smat_attention(mask=mask, log_decay=gates, **inputs)
    out.sum().backward()
    expected, _ = attend_densely(inputs | {"log_decay": gates}, mask)
    assert out.dtype == torch.bfloat16
    assert relative_rms(out.detach(), expected) <= 5e-3
    assert inputs["q"].grad.isfinite().all()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_gradients_of_a_repeated_position_are_added_up_wide(dtype, padded):
    """Three readers of one row all but cancel, and what is left of them has its digits."""
    mask, inputs = smat.SMatMask(40, 3, 8, field_size=3), make_inputs(40, batch=1, dtype=dtype)
    generator, reads = torch.Generator().manual_seed(4), (1, 40, 2, 2)
    inputs["log_decay"] = mild_gates((1, 40, 2)).to(dtype)
    inputs["query_type"] = torch.randint(12, reads, generator=generator)
    inputs["read_weight"] = torch.rand(reads, generator=generator).to(dtype)
    options = {"attention_mask": torch.ones(1, 40)} if padded else {}
    found, expected = leaves(inputs), leaves(inputs, torch.float64)
    rows, eps = torch.tensor([37, 37, 37]), torch.finfo(dtype).eps
    out, _ = smat.smat_attention(mask=mask, positions=rows, **found, **options)
    pull = 1 + eps * torch.randint(int(1 / eps), out.shape, generator=generator)
    pull[:, 2] = -pull[:, :2].sum(1).to(dtype) - 2 * eps
    assert torch.equal(pull.to(dtype).float(), pull)
    out.backward(pull.to(dtype))
    once = smat.reference_attention(mask=mask, **expected, **options)[:, [37]]
    once.backward(pull.double().sum(1, keepdim=True))
    for name, x in found.items():
        if x.requires_grad:
            assert relative_rms(x.grad, expected[name].grad) <= 1e-2, name
