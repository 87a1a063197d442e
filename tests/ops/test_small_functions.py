"""Features and exponentials with derivatives of their own, against autograd's."""

import pytest
import torch

from smat.ops.feature_maps import pointwise_map
from smat.ops.linear.decay import exp_or_zero


def draw(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("name", ["elu", "relu", "identity"])
def test_feature_maps_have_their_derivatives(name):
    x = draw(3, 8, 5)
    torch.autograd.gradcheck(lambda each: pointwise_map(name, each), (x,))


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
