"""The tiled convolution against the sum that defines it, outputs and gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from smat.layers import short_convolution
from smat.layers.short_convolution import convolve


def definition(x, weight, bias, activation, first):
    length, width = x.shape[1], weight.shape[1]
    out = torch.zeros_like(x)
    for t in range(length):
        for lag in range(width):
            seen = torch.full((len(x),), t - lag >= 0)
            if first is not None:
                seen = seen & (t - lag >= first[:, t])
            if t - lag >= 0:
                out[:, t] += seen[:, None] * x[:, t - lag] * weight[:, width - 1 - lag]
    out = out if bias is None else out + bias
    return F.silu(out) if activation else out


@given(st.data())
def test_outputs_and_gradients_are_those_of_the_definition(data):
    batch, length, width, channels = (
        data.draw(st.integers(1, top)) for top in (3, 9, 4, 5)
    )  # fmt: skip
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, weight, grad = (
        draw(batch, length, channels),
        draw(channels, width),
        draw(batch, length, channels),
    )
    bias = draw(channels) if data.draw(st.booleans()) else None
    activation = data.draw(st.booleans())
    first = None
    if data.draw(st.booleans()):
        back = torch.randint(
            0, 4, (data.draw(st.sampled_from([1, batch])), length), generator=generator
        )
        first = (torch.arange(length) - back).clamp(min=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            short_convolution, "TILE_ELEMENTS", data.draw(st.sampled_from([1, 7, 30, 1 << 18]))
        )
        inputs = [x, weight] if bias is None else [x, weight, bias]
        found = convolve(x, weight, bias, activation, first)
        expected = definition(x, weight, bias, activation, first)
        torch.testing.assert_close(found, expected)
        pairs = (torch.autograd.grad(y, inputs, grad) for y in (found, expected))
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other)


def test_what_a_token_may_not_see_may_be_anything():
    x = torch.ones(1, 6, 2, requires_grad=True)
    poisoned = x.masked_fill(torch.arange(6)[:, None] == 2, torch.nan)
    first = torch.tensor([[0, 0, 0, 3, 3, 3]])
    out = convolve(poisoned, torch.ones(2, 3), None, activation=True, first=first)
    assert out[:, 3:].isfinite().all()
    (grad,) = torch.autograd.grad(out[:, 3:].sum(), x)
    assert grad[:, 3:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_in_full(dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 50, 8).to(dtype), torch.randn(8, 4).to(dtype)
    found = convolve(x, weight, None, activation=True)
    expected = definition(x.double(), weight.double(), None, True, None)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)
