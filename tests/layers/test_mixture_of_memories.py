"""The mixture of memories against its definition, one token and one memory at a time."""

import pytest
import torch
import torch.nn.functional as F

from smat.layers import MixtureOfMemories
from smat.layers.mixture_of_memories import Visits
from tests.layers.mixers import HIDDEN, make, relative_rms, tokens


def one_convolution(conv, history):
    """Convolve a list of inputs at its last one."""
    taps = conv.weight.flip(1).unbind(1)  # the tap of the token itself first
    recent = list(reversed(history))[: len(taps)]
    return F.silu(sum(tap * each for tap, each in zip(taps, recent, strict=False)))


def unit(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def step_by_step(layer, x, router):
    """Write the layer out for one sequence (T, hidden)."""
    heads, queries, outputs = layer.num_heads, [], []
    received = [[] for _ in range(layer.num_memories)]
    state = [x.new_zeros(heads, layer.head_dim, layer.value_dim)] * layer.num_memories
    for token in x:
        share = layer.routers[router](token).softmax(-1)
        chosen = share.sort(descending=True).indices[: layer.num_chosen].tolist()
        queries.append(layer.q_proj(token))
        q = unit(one_convolution(layer.q_conv, queries).view(heads, -1))
        y = x.new_zeros(heads, layer.value_dim)
        for m in chosen:
            key_value, beta, step = (token @ layer.bank[m]).split(
                [sum(layer.widths[:2]), heads, heads]
            )
            received[m].append(key_value)
            k, v = one_convolution(layer.kv_conv, received[m]).split(layer.widths[:2])
            k, v = unit(k.view(heads, -1)), v.view(heads, -1)
            decay = torch.exp(-layer.A_log[m].exp() * F.softplus(step + layer.dt_bias[m]))
            held = decay[:, None, None] * state[m]
            change = beta.sigmoid()[:, None] * (v - torch.einsum("hkv,hk->hv", held, k))
            state[m] = held + torch.einsum("hk,hv->hkv", k, change)
            weight = share[m] / share[chosen].sum()
            y = y + weight * torch.einsum("hkv,hk->hv", state[m], q) * layer.head_dim**-0.5
        normed = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
        outputs.append(layer.o_proj((normed * F.silu(layer.g_proj(token)).view_as(y)).flatten()))
    return torch.stack(outputs), torch.stack(state)


@pytest.mark.parametrize("tilted", [False, True])
def test_equals_its_definition_with_every_gradient(tilted):
    layer = make("mixture of memories")
    if tilted:  # nearly all tokens to one memory
        with torch.no_grad():
            layer.routers["0"].weight[2] += 3 * tokens(1, 1)[0][0, 0]
    x, _ = tokens(2, 70)
    found, _, cache = layer(x, use_cache=True)
    expected = [step_by_step(layer, row, "0") for row in x]
    out = torch.stack([each for each, _ in expected])
    assert relative_rms(found, out) < 1e-12
    for row, (_, state) in enumerate(expected):
        assert relative_rms(cache["state"][row], state.detach()) < 1e-12
    probe = torch.randn_like(out)
    named = dict(layer.named_parameters())
    grads = [torch.autograd.grad((each * probe).sum(), named.values()) for each in (found, out)]
    for name, one, other in zip(named, *grads, strict=True):
        assert relative_rms(one, other) < 1e-10, name


def test_a_router_for_each_length_shares_the_first_memories():
    torch.manual_seed(0)
    counts = {16: 3, 40: 6}
    layer = MixtureOfMemories(HIDDEN, counts, num_chosen=2, num_heads=2, head_dim=3).double()
    assert layer.num_memories == len(layer.bank) == 6
    assert {name: len(each.weight) for name, each in layer.routers.items()} == {"16": 3, "40": 6}
    for length, router in ((5, "16"), (16, "16"), (17, "40"), (50, "40")):
        x, _ = tokens(1, length)
        assert relative_rms(layer(x)[0][0], step_by_step(layer, x[0], router)[0]) < 1e-12
    x, _ = tokens(1, 20)
    expected, _ = step_by_step(layer, x[0], "16")
    _, _, cache = layer(x[:, :14], use_cache=True)
    for t in range(14, 20):  # decoding keeps to the router that it began with
        out, cache = layer.step(x[:, t], cache)
        assert relative_rms(out[0], expected[t]) < 1e-12
    with pytest.raises(ValueError, match=r"2 routers.*\[16, 40\]"):
        layer(x, cu_seqlens=torch.tensor([0, 4, 20]))


def test_work_follows_the_visits_not_the_memories():
    """All sequences together are as long as the visits, padded by a third at most."""
    memory = torch.randint(40, (3, 500, 4), generator=torch.Generator().manual_seed(0))
    memory[:, :, 0] = 7
    batches = list(Visits(memory, 40).sequences())
    assert sum(int(each.lengths.sum()) for each in batches) == 3 * 500 * 4
    assert sum(each.place.numel() for each in batches) <= 3 * 500 * 4 * 4 / 3 + 40 * 8
    assert len(batches) < 20


def test_balance():
    layer = make("mixture of memories")
    x, _ = tokens(2, 30)
    layer(x)
    share = layer.routers["0"](x).softmax(-1)
    visits = F.one_hot(share.topk(2).indices, 5).double().mean((0, 1, 2))
    expected = 5 * (visits * share.mean((0, 1))).sum()
    torch.testing.assert_close(layer.balance_loss, expected)
    (grad,) = torch.autograd.grad(layer.balance_loss, layer.routers["0"].weight)
    assert grad.abs().max() > 0
    real = torch.ones(2, 30)
    real[1, 11:] = 0
    layer(x, real)
    kept = layer.balance_loss
    share = torch.cat([share[0], share[1, :11]])
    visits = F.one_hot(share.topk(2).indices, 5).double().mean((0, 1))
    torch.testing.assert_close(kept, 5 * (visits * share.mean(0)).sum())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_memories": 3}, "choose 4 of 3"),
        ({"num_memories": {}}, "choose 4 of {}"),
        ({"num_memories": 8, "num_chosen": 0}, "choose 0 of 8"),
        ({"num_memories": 8, "expand_v": 0.3}, r"0\.3"),
    ],
)
def test_bad_settings_are_refused_with_their_numbers(arguments, message):
    with pytest.raises(ValueError, match=message):
        MixtureOfMemories(HIDDEN, **arguments)
