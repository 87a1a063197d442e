"""Norms, rotary positions, gates and short convolutions against plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from smat.layers import SoftmaxAttention
from smat.layers.primitives import (
    GateThenNorm,
    NormThenGate,
    RMSNorm,
    init_decay_rate_,
    init_step_bias_,
    rotate,
)
from smat.layers.short_convolution import ShortConvolution
from tests.layers.mixers import convolve, make, relative_rms, tokens


def test_norms_equal_torch_in_both_orders():
    x, gate = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    for norm in (RMSNorm(8), NormThenGate(8), GateThenNorm(8)):
        torch.nn.init.normal_(norm.double().weight)
    plain, after, before = RMSNorm(8).double(), NormThenGate(8).double(), GateThenNorm(8).double()
    expected = F.rms_norm(x, (8,), eps=1e-5)
    assert torch.allclose(plain(x), expected)
    assert torch.allclose(after(x, gate), expected * F.silu(gate))
    assert torch.allclose(before(x, gate), F.rms_norm(x * F.silu(gate), (8,), eps=1e-5))


def test_groups_are_normalised_apart():
    x = torch.randn(4, 12, dtype=torch.float64)
    found = RMSNorm(12, num_groups=3).double()(x)
    expected = F.rms_norm(x.view(4, 3, 4), (4,), eps=1e-5).view(4, 12)
    assert torch.allclose(found, expected)
    with pytest.raises(ValueError, match="12 does not fall into 5"):
        RMSNorm(12, num_groups=5)


def test_rotation_depends_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    scores = [
        (rotate(q, torch.tensor([[at + 5]])) * rotate(k, torch.tensor([[at]]))).sum()
        for at in (0, 3, 1000)
    ]
    assert torch.allclose(torch.stack(scores), scores[0])
    with pytest.raises(ValueError, match="7"):
        rotate(torch.randn(1, 1, 1, 7), torch.tensor([[0]]))


@pytest.mark.parametrize(("width", "bias"), [(1, False), (3, True), (4, False)])
def test_convolution_equals_torch(width, bias):
    torch.manual_seed(0)
    conv = ShortConvolution(6, width, bias).double()
    x = torch.randn(2, 9, 6, dtype=torch.float64)
    assert torch.allclose(conv(x), convolve(x, conv))
    for split in range(1, 9):
        state = conv.next_state(x[:, :split])
        assert torch.allclose(conv(x[:, split:], state), conv(x)[:, split:])


def test_a_convolution_looks_back_no_further_than_it_may():
    torch.manual_seed(0)
    conv = ShortConvolution(6, 4).double()
    x = torch.randn(1, 9, 6, dtype=torch.float64)
    first = torch.tensor([[0, 0, 0, 3, 3, 3, 6, 6, 6]])
    expected = torch.cat([conv(part) for part in x.split(3, 1)], 1)
    assert torch.allclose(conv(x, first=first), expected)


def test_initial_gates_lie_where_they_should():
    torch.manual_seed(0)
    step = F.softplus(init_step_bias_(torch.empty(4000, dtype=torch.float64)))
    assert 1e-3 <= step.min() < 1.1e-3
    assert 0.09 < step.max() <= 0.1
    assert abs(step.log().mean() - torch.tensor(1e-2).log()) < 0.1
    rate = init_decay_rate_(torch.empty(4000), 0.0, 16.0).exp()
    assert rate.min() > 0
    assert 15.9 < rate.max() <= 16.001


@pytest.mark.parametrize("name", ["softmax", "softmax learned"])
def test_softmax_attention_equals_its_formula(name):
    layer = make(name)
    x, _ = tokens(2, 13)
    position = torch.arange(13).unsqueeze(0)
    inputs = x + layer.position_table[:13] if layer.max_length else x
    parts = layer.qkv_proj(inputs).split(layer.widths, -1)
    q, k, v = (part.unflatten(-1, (-1, layer.head_dim)) for part in parts)
    q, k = layer.q_norm(q), layer.k_norm(k)
    if layer.positions == "rotary":
        q, k = rotate(q, position), rotate(k, position)
    k, v = (part.repeat_interleave(layer.num_heads // layer.num_kv_heads, 2) for part in (k, v))
    scores = torch.einsum("bihk,bjhk->bhij", q, k) * layer.head_dim**-0.5
    hidden = torch.ones(13, 13, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    y = torch.einsum("bhij,bjhv->bihv", weights, v).flatten(-2)
    assert relative_rms(layer(x)[0], layer.o_proj(y)) < 1e-12


def test_softmax_attention_refuses_what_it_has_no_positions_for():
    with pytest.raises(ValueError, match="max_length = None"):
        SoftmaxAttention(12, positions="learned")
    with pytest.raises(ValueError, match="'sinusoidal'"):
        SoftmaxAttention(12, positions="sinusoidal")
    layer = SoftmaxAttention(12, num_heads=2, positions="learned", max_length=4)
    with pytest.raises(ValueError, match=r"5 tokens.* 4"):
        layer(torch.randn(1, 5, 12))
    _, _, cache = layer(torch.randn(1, 4, 12), use_cache=True)
    with pytest.raises(ValueError, match=r"5 tokens.* 4"):
        layer.step(torch.randn(1, 12), cache)
