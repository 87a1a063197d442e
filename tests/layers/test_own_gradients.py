"""Norm and scores with gradients of their own, against autograd's."""

import pytest
import torch

from smat.layers import primitives
from smat.layers.primitives import rms_norm
from smat.layers.routing.selectors import chosen_scores
from smat.layers.short_convolution import convolve


def draw(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("tile", [1, 20, 1 << 16])
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 7, 6), (0, 6)])
def test_norm_and_its_gradients(monkeypatch, shape, num_groups, tile):
    monkeypatch.setattr(primitives, "TILE_ELEMENTS", tile)
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


def test_gradients_of_torch_func_are_those_of_autograd():
    x, weight, bias = draw(2, 9, 6), draw(6, seed=1), draw(6, seed=2)
    taps, matrix = draw(6, 3, seed=3), draw(6, 6, seed=4)
    chosen = torch.arange(9).expand(2, 9).remainder(3).view(2, 9, 1, 1)

    def loss(x, weight, bias, taps, matrix):
        convolved = convolve(rms_norm(x, weight, 1e-3), taps, bias, activation=True)
        scores = (convolved @ matrix.t() + bias).detach().unsqueeze(2)
        return chosen_scores(scores, chosen, convolved, matrix, bias).square().sum()

    given = (x, weight, bias, taps, matrix)
    expected = torch.autograd.grad(loss(*given), given)
    found = torch.func.grad(loss, argnums=(0, 1, 2, 3, 4))(*(each.detach() for each in given))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e20])
def test_what_is_not_finite_raises_nothing(value):
    x = draw(2, 9, 6, dtype=torch.float32).detach()
    x[0, 4, 1] = value
    x.requires_grad_()
    weight, taps = draw(6, dtype=torch.float32, seed=1), draw(6, 3, dtype=torch.float32, seed=3)
    y = convolve(rms_norm(x, weight, 1e-3), taps, None, activation=True)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert y[1].isfinite().all()
    assert grad[1].isfinite().all()
    assert y[0].isfinite().all() == (value == 1e20)
