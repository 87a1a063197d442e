"""Backbones with a geometry for each length, and the losses that a model's routings leave."""

import pytest
import torch

import smat
from smat.layers import (
    ContentRouting,
    GatedDeltaNet,
    LearnedRouting,
    Mamba2,
    MixtureOfMemories,
    ProfileMemory,
    SMatAttention,
    TransportedMemory,
    kept_mask,
    sum_balance_losses,
)
from tests.layers.mixers import relative_rms

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
LENGTHS = (32, 64, 128)
KINDS = {
    "mamba2": (Mamba2, ProfileMemory, {"head_dim": 8, "state_dim": 8}),
    "gated deltanet": (
        GatedDeltaNet, TransportedMemory, {"num_heads": 4, "head_dim": 8, "expand_v": 1.0},
    ),
}  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS)


def make(kind, memory, seed=0):
    torch.manual_seed(seed)
    backbone, _, options = KINDS[kind]
    return backbone(16, memory=memory(KINDS[kind][1]), **options).double()


def by_length(kind, seed=0, **options):
    return make(
        kind, lambda cls: cls.for_lengths(16, 4, vc_dim=3, lengths=LENGTHS, **options), seed
    )


@each_kind
def test_a_call_takes_the_geometry_of_its_length(kind):
    layer = by_length(kind)
    for length in (20, 32, 33, 64, 128, 150):
        own = next((each for each in LENGTHS if each >= length), 128)
        single = make(kind, lambda cls, own=own: cls(16, 4, kept_mask(own, 3)), seed=1)
        wanted = single.state_dict().keys()
        single.load_state_dict({k: v for k, v in layer.state_dict().items() if k in wanted})
        x = torch.randn(2, length, 16, dtype=torch.float64)
        assert torch.equal(layer(x)[0], single(x)[0])


@each_kind
def test_decoding_keeps_to_the_geometry_that_it_began_with(kind):
    layer = by_length(kind)
    x = torch.randn(1, 64, 16, dtype=torch.float64)
    mask = layer.memory.mask_by_length[64]
    with torch.no_grad():
        whole = layer(x)[0]
        out, _, cache = layer(x[:, :40], use_cache=True, mask=mask)
        found = [out]
        for token in x[:, 40:].unbind(1):
            out, cache = layer.step(token, cache)
            found.append(out.unsqueeze(1))
    assert relative_rms(torch.cat(found, 1), whole) < 1e-10


@each_kind
def test_each_length_trains_its_own_parameters(kind):
    layer = by_length(kind)
    sizes = [kept_mask(length, 3).geometry.field_size for length in LENGTHS]
    assert list(layer.memory.learned.selectors) == [str(size) for size in sorted(set(sizes))]
    x = torch.randn(2, 128, 16, dtype=torch.float64)
    (layer(x)[0].square().sum() + sum_balance_losses(layer)).backward()
    for size, selector in layer.memory.learned.selectors.items():
        grads = [each.grad is not None for each in selector.parameters()]
        assert all(grads) if size == str(sizes[-1]) else not any(grads)


def test_packed_sequences_name_their_geometry():
    layer = by_length("mamba2")
    x = torch.randn(1, 100, 16, dtype=torch.float64)
    edges = torch.tensor([0, 40, 100])
    with pytest.raises(ValueError, match=r"\[32, 64, 128\]"):
        layer(x, cu_seqlens=edges)
    mask = layer.memory.mask_by_length[64]
    out = layer(x, cu_seqlens=edges, mask=mask)[0]
    assert relative_rms(out[:, 40:], layer(x[:, 40:])[0]) < 1e-12
    with pytest.raises(ValueError, match="got none"):
        ProfileMemory.for_lengths(16, 4, vc_dim=3, lengths=[])


def test_a_model_adds_up_the_losses_of_all_its_routings():
    learned = LearnedRouting(16, 2, smat.Geometry(3, 3))
    attention = SMatAttention(
        16, num_heads=2, vc_dim=3, field_size=3, horizon=64, chunk_size=16,
        routing=ContentRouting(learned),
    )  # fmt: skip
    mixture = MixtureOfMemories(16, 6, num_heads=2, head_dim=4)
    backbone = by_length("mamba2").float()
    model = torch.nn.ModuleList([attention, mixture, backbone, torch.nn.Linear(1, 1)])
    assert sum_balance_losses(model) is None
    x = torch.randn(2, 64, 16)
    for layer in model[:3]:
        layer(x)
    losses = [attention.routing.balance_loss, mixture.balance_loss, backbone.memory.balance_loss]
    torch.testing.assert_close(sum_balance_losses(model), sum(losses))
    sum_balance_losses(model).backward()
    assert mixture.routers["0"].weight.grad.abs().max() > 0
    assert learned.conv.weight.grad.abs().max() > 0
