"""Gradients of gates in fp32 against the dense form: they keep their digits, sums too."""

import pytest
import torch

import smat
from tests.ops.smat.by_rows import attend_by_rows
from tests.ops.smat.comparison import make_inputs, relative_rms

GATES = (-1e-3, -0.1, -1.0, -5.0, -10.0, -20.0)
CASES = [
    pytest.param(boundary, scope, id=f"{name} {scope}")
    for name, boundary in (("fixed", None), ("window", 1))
    for scope in ("all", "recurrent")
]


def gate_gradient(attend, gate, length, boundary, scope, normalize, dtype):
    """Differentiate by constant gates."""
    schedule = boundary and smat.schedules.window(length // 8)
    mask = smat.SMatMask(length, 2, boundary=schedule)
    inputs = make_inputs(length, batch=1, heads=1, key_dim=8, value_dim=8, dtype=torch.float32)
    log_decay = torch.full((1, length, 1), gate, dtype=dtype, requires_grad=True)
    out, _ = attend(
        mask=mask, **{name: x.to(dtype) for name, x in inputs.items()}, log_decay=log_decay,
        normalize=normalize, decay_scope=scope,
    )  # fmt: skip
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return torch.autograd.grad(out, log_decay, pull)[0].double()


def check(gate, length, *case):
    found = gate_gradient(smat.smat_attention, gate, length, *case, torch.float32)
    expected = gate_gradient(attend_by_rows, gate, length, *case, torch.float64)
    assert relative_rms(found, expected) <= 1e-4
    assert abs(found.sum() - expected.sum()) <= 1e-4 * expected.sum().abs()


@pytest.mark.parametrize(("boundary", "scope"), CASES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_the_gradient_of_gates_has_its_digits_in_fp32(gate, boundary, scope, normalize):
    check(gate, 1024, boundary, scope, normalize)


@pytest.mark.slow
@pytest.mark.parametrize(("boundary", "scope"), CASES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_it_has_them_after_8192_tokens(gate, boundary, scope, normalize):
    check(gate, 8192, boundary, scope, normalize)


def test_the_dense_form_in_blocks_is_the_oracle():
    """All that it takes, beside the oracle that shares no code with it."""
    mask, generator = smat.SMatMask(300, 3, 16, field_size=3), torch.Generator().manual_seed(2)
    inputs = make_inputs(300, batch=1, heads=2)
    shape, reads = (1, 300, 2), (1, 300, 2, 2)
    inputs["log_decay"] = -torch.rand(shape, generator=generator, dtype=torch.float64)
    for name in ("key_gate", "write_weight"):
        inputs[name] = torch.rand(shape, generator=generator, dtype=torch.float64)
    inputs["profile"] = torch.randint(9, shape, generator=generator)
    inputs["query_type"] = torch.randint(12, reads, generator=generator)
    inputs["read_weight"] = torch.rand(reads, generator=generator, dtype=torch.float64)
    for options in ({}, {"normalize": False, "branch": "long_range", "decay_scope": "recurrent"}):
        found, _ = attend_by_rows(mask=mask, **inputs, **options)
        assert relative_rms(found, smat.reference_attention(mask=mask, **inputs, **options)) < 1e-12
