"""What makes a learned memory learn: starts, straight-through gradients, settings that fit."""

import dataclasses

import pytest
import torch

from smat.geometry import Geometry
from smat.layers import (
    GatedDeltaNet,
    LearnedRouting,
    Mamba2,
    MemorySettings,
    ProfileMemory,
    TransportedMemory,
)
from smat.masks import rebuilt, window
from smat.models.mixers import MIXERS
from smat.tasks import MQAR

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")  # masks of few tokens
SMALL = {"vc_dim": 3, "horizon": 64}
MAMBA, DELTA = {"head_dim": 8, "state_dim": 4}, {"num_heads": 2, "head_dim": 8}


def test_a_token_reads_where_the_token_behind_it_is_written():
    torch.manual_seed(0)
    geometry = Geometry(3, 5)
    incidence = geometry.incidence()
    shares = {}
    for start in ("previous_token", "random"):
        learned = LearnedRouting(64, 4, geometry, router_init=start)
        routing, _ = learned(torch.randn(4, 200, 64))
        written, read = routing.profile[:, 1:], routing.query_type[:, :-1]
        hits = incidence[read, written.unsqueeze(-1).expand_as(read)].float()
        shares[start] = (hits * routing.read_weight[:, :-1]).sum(-1).mean().item()
    assert shares["previous_token"] > 0.35
    assert shares["random"] < 0.25  # a line of the plane of 25 points holds 5


def test_at_two_dimensions_the_best_type_is_the_own_bin():
    torch.manual_seed(0)
    learned = LearnedRouting(64, 4, Geometry(2, 7), router_init="previous_token")
    routing, _ = learned(torch.randn(4, 200, 64))
    assert (routing.query_type[:, :-1, :, 0] == routing.profile[:, 1:]).float().mean() > 0.8


@pytest.mark.parametrize("start", ["previous_token", "average", "random"])
def test_a_reset_draws_everything_anew_as_the_settings_say(start):
    settings = MemorySettings(router_init=start, selector_conv=3)
    with torch.device("meta"):
        layer = Mamba2.with_memory(16, **SMALL, **MAMBA, settings=settings)
    layer.to_empty(device="cpu")
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(3)
    layer.reset_parameters()
    fresh = Mamba2.with_memory(16, **SMALL, **MAMBA, settings=settings)
    torch.manual_seed(3)
    fresh.reset_parameters()
    for (name, found), expected in zip(
        layer.state_dict().items(), fresh.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected), name
    taps = {"previous_token": [0, 0, 1, 0], "average": [0.25] * 4}.get(start)
    assert taps is None or torch.equal(
        layer.memory.learned.conv.weight, torch.tensor(taps, dtype=torch.float).expand(16, -1)
    )


def test_a_memory_begins_large_enough_to_learn():
    x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1))
    shares = {}
    for settings in ("default", "paper"):
        torch.manual_seed(0)
        layer = Mamba2.with_memory(64, **SMALL, head_dim=32, state_dim=32, settings=settings)
        with_memory = layer(x)[0]
        torch.nn.init.constant_(layer.memory.read_gate.head_logit, -1e4)
        alone = layer(x)[0]
        shares[settings] = (with_memory - alone)[:, 32:].norm() / alone[:, 32:].norm()
    assert shares["default"] > 0.1
    assert shares["paper"] < 0.02


def test_tiny_steps_write_finite_values():
    layer = Mamba2.with_memory(16, **SMALL, **MAMBA)
    torch.nn.init.constant_(layer.dt_bias, -200.0)  # softplus gives exactly 0
    out = layer(torch.randn(2, 64, 16))[0]
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_a_neighbour_changes_gradients_of_the_hash_alone():
    x = torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for kind, options in ((Mamba2, MAMBA), (GatedDeltaNet, DELTA)):
        outs, grads = [], []
        for way in ("neighbour", "one_sided"):
            torch.manual_seed(0)
            settings = MemorySettings(straight_through=way)
            layer = kind.with_memory(16, **SMALL, **options, settings=settings).double()
            outs.append(layer(x)[0])
            outs[-1].square().sum().backward()
            grads.append({name: p.grad for name, p in layer.named_parameters()})
        assert torch.equal(*outs)
        for name, one in grads[0].items():
            is_hash = name.startswith(("memory.learned.conv", "memory.learned.projections"))
            assert torch.allclose(one, grads[1][name], rtol=1e-9, atol=1e-12) != is_hash, name


def test_what_does_not_fit_is_refused_at_construction():
    with pytest.raises(ValueError, match="16 with 3 heads does not fit a layer of 16 with 4 heads"):
        Mamba2(16, **MAMBA, memory=ProfileMemory.for_horizon(16, 3, **SMALL))
    with pytest.raises(ValueError, match=r"width 8 .* layer of 16 with 2 heads"):
        GatedDeltaNet(16, **DELTA, memory=TransportedMemory.for_horizon(8, 2, **SMALL))
    with pytest.raises(ValueError, match=r"kept\(32\).*boundary = rebuilt"):
        Mamba2.with_memory(16, **SMALL, **MAMBA, boundary=rebuilt())
    memory = TransportedMemory.for_horizon(16, 2, **SMALL, boundary=window(16))
    with pytest.raises(ValueError, match="kept boundary"):
        GatedDeltaNet(16, **DELTA, memory=memory)
    with pytest.raises(ValueError, match="no heads of 24"):
        Mamba2.with_memory(16, **SMALL, head_dim=24)
    with pytest.raises(ValueError, match="none, erase, backbone, got 'some'"):
        MemorySettings(memory_decay="some")
    with pytest.raises(ValueError, match="got 'papers'"):
        Mamba2.with_memory(16, **SMALL, **MAMBA, settings="papers")
    with pytest.raises(ValueError, match="-1"):
        MemorySettings(selector_conv=-1)
    with pytest.raises(ValueError, match="convolution of 3 before the scorer, got 4"):
        Mamba2.with_memory(
            16, **SMALL, **MAMBA, settings=MemorySettings(selector_conv=3, request_tokens=4)
        )
    with pytest.raises(ValueError, match="conv_bias is False"):
        Mamba2.with_memory(16, **SMALL, **MAMBA, settings="even", conv_bias=False)
    with pytest.raises(ValueError, match="got 0"):
        MemorySettings(request_tokens=0)


@pytest.mark.parametrize(
    ("name", "opening"), [("default", 0.5), ("even", 0.5), ("language", 0.05), ("paper", 0.1)]
)
def test_gates_begin_as_the_settings_of_a_name_say(name, opening):
    memory = Mamba2.with_memory(16, **SMALL, **MAMBA, settings=name).memory
    for gate in (memory.read_gate, memory.write_gate):
        torch.nn.init.zeros_(gate.linear.weight)
        found = gate(torch.randn(2, 5, 16))
        torch.testing.assert_close(found, torch.full_like(found, opening), rtol=0, atol=5e-5)


def test_experiments_learn_unless_they_say_so():
    for mixer in ("mamba2_smat", "gated_deltanet_smat"):
        options = {"vc_dim": 3, "head_dim": 16}
        text = MIXERS[mixer](32, MQAR(), **options, settings="paper")
        assert text.memory.settings == MemorySettings.paper()
        chosen = {"selector_conv": 3, "request_tokens": 2}
        learns = MIXERS[mixer](32, MQAR(), **options, **chosen)
        assert learns.memory.settings == dataclasses.replace(MemorySettings(), **chosen)
