"""Norm, projections, scores and features with gradients of their own, against autograd's."""

import pytest
import torch

from smat.layers.routing.selectors import _highest
from smat.ops import normalize
from smat.ops.chosen_scores import chosen_scores
from smat.ops.decay import exp_or_zero_
from smat.ops.feature_maps import pointwise_map
from smat.ops.normalize import rms_norm
from smat.ops.project import project


def draw(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("block", [1, 20, 1 << 16])
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 7, 6), (0, 6)])
def test_norm_and_its_gradients(monkeypatch, shape, num_groups, block):
    monkeypatch.setattr(normalize, "BLOCK_ELEMENTS", block)
    x, weight, grad = draw(*shape), draw(6, seed=1), draw(*shape, seed=2)
    groups = x.unflatten(-1, (num_groups, -1))
    scale = (groups.square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    expected = (groups * scale).flatten(-2) * weight
    found = rms_norm(x, weight, 1e-3, num_groups)
    torch.testing.assert_close(found, expected)
    pairs = (torch.autograd.grad(y, (x, weight), grad) for y in (found, expected))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_norm_of_strided_input():
    x = draw(4, 3, 12)[..., ::2]
    torch.testing.assert_close(
        rms_norm(x, torch.ones(6, dtype=torch.float64), 1e-5),
        rms_norm(x.contiguous(), torch.ones(6, dtype=torch.float64), 1e-5),
    )


def test_projections_are_products_and_gradients_add_up():
    x, one, other = draw(2, 5, 4), draw(3, 4, seed=1), draw(7, 4, seed=2)
    assert torch.autograd.gradcheck(project, (x, one, other))
    for found, weight in zip(project(x, one, other), (one, other), strict=True):
        torch.testing.assert_close(found, x @ weight.t())


def test_projections_under_autocast_are_in_half_precision_with_full_gradients():
    x, weight = draw(2, 5, 4, dtype=torch.float32), draw(3, 4, dtype=torch.float32, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        (y,) = project(x, weight)
    assert y.dtype == torch.bfloat16
    grads = torch.autograd.grad(y.float().sum(), (x, weight))
    assert [grad.dtype for grad in grads] == [torch.float32] * 2
    torch.testing.assert_close(y.float(), x @ weight.t(), rtol=0.03, atol=0.03)


@pytest.mark.parametrize("name", ["elu", "relu", "identity"])
def test_feature_maps_have_their_derivatives(name):
    x = draw(3, 8, 5)
    torch.autograd.gradcheck(lambda each: pointwise_map(name, each), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exponentials_have_no_subnormal_numbers(dtype):
    tiny = torch.finfo(dtype).tiny
    x = torch.linspace(-800, 0, 10_001, dtype=dtype)
    found, expected = exp_or_zero_(x.clone()), x.exp()
    normal = expected > 1.01 * tiny
    torch.testing.assert_close(found[normal], expected[normal], rtol=0, atol=0)
    assert (found[expected < tiny] == 0).all()
    assert exp_or_zero_(torch.tensor([-torch.inf], dtype=dtype)) == 0
    wide = exp_or_zero_(torch.tensor([-90.0], dtype=torch.float64), torch.float32)
    assert wide == 0


@pytest.mark.parametrize("shape", [(2, 30), (7,), (0,)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_chosen_scores_have_the_gradients_of_all_scores_at_the_chosen(shape, dtype):
    heads, classes, width = 3, 5, 4
    x, weight, bias = (
        draw(*size, dtype=dtype, seed=seed).detach().requires_grad_()
        for seed, size in enumerate([(*shape, width), (heads * classes, width), (heads * classes,)])
    )
    dense = (x.double() @ weight.double().T + bias.double()).unflatten(-1, (heads, classes))
    chosen = dense.topk(2).indices
    pull = draw(*chosen.shape, seed=3).detach()
    expected = torch.autograd.grad(dense.gather(-1, chosen), (x, weight, bias), pull)
    wide = torch.promote_types(dtype, torch.float32)
    some = chosen_scores(dense.detach().to(wide), chosen, x, weight, bias)
    assert torch.equal(some, dense.detach().gather(-1, chosen).to(wide))
    found = torch.autograd.grad(some, (x, weight, bias), pull.to(wide))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other.to(dtype))


def test_highest_finds_what_topk_finds():
    for size in (4, 100, 300):
        scores = draw(20, size).detach()
        assert torch.equal(_highest(scores, 4), scores.topk(4).indices)
