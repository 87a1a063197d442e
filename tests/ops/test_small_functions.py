"""Features and exponentials with derivatives of their own, against autograd's."""

import pytest
import torch

from smat.ops.feature_maps import pointwise, pointwise_backward_, pointwise_rows
from smat.ops.linear.decay import exp_or_zero


def draw(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("name", ["elu", "relu", "identity"])
def test_feature_maps_have_their_derivatives(name):
    x, grad = draw(3, 8, 5).detach(), draw(3, 8, 5, seed=1).detach()
    x[0, 0, :2] = 0.0
    own = x.clone().requires_grad_()
    maps = {"elu": lambda x: torch.nn.functional.elu(x) + 1, "relu": torch.relu}
    value = maps.get(name, lambda x: x.clone())(own)
    (expected,) = torch.autograd.grad(value, own, grad)
    found = pointwise(name, x.clone())
    torch.testing.assert_close(found, value.detach())
    torch.testing.assert_close(pointwise_rows(name, x.mT, torch.float64), value.detach().mT)
    torch.testing.assert_close(pointwise_backward_(name, found, grad.clone()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_have_no_subnormal_numbers(dtype):
    tiny = torch.finfo(dtype).tiny
    x = torch.linspace(-800, 0, 10_001, dtype=dtype)
    found, expected = exp_or_zero(x.clone()), x.exp()
    normal = expected > 1.01 * tiny
    torch.testing.assert_close(found[normal], expected[normal], rtol=0, atol=0)
    assert (found[expected < tiny] == 0).all()
    assert exp_or_zero(torch.tensor([-torch.inf], dtype=dtype)) == 0
    wide = exp_or_zero(torch.tensor([-90.0], dtype=torch.float64), torch.float32)
    assert wide == 0
