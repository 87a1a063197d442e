"""Layers computed at a few positions alone: rows of the whole, gradients included."""

import pytest
import torch

from smat.layers import SMatAttention
from tests.layers.mixers import HIDDEN, LAYERS, extras, make, relative_rms, tokens

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
NAMES = [name for name in LAYERS if name.startswith(("smat", "linear"))]
NAMES += [name for name in LAYERS if "mamba2" in name and "log-linear" not in name]
ROWS = torch.tensor([19, 3, 12, 3, 8, 17])


def gradients(layer, x, out, probe):
    """Differentiate by the input and every parameter."""
    named = layer.named_parameters()
    leaves = {"x": x, **{name: each for name, each in named if each.requires_grad}}
    found = torch.autograd.grad((out * probe).sum(), leaves.values(), allow_unused=True)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_the_whole_with_every_gradient(name):
    layer = make(name)
    assert layer.reads_at_queries
    x, ids = tokens(2, 20)
    x.requires_grad_()
    some = layer(x, **extras(layer, ids), positions=ROWS)[0]
    whole = layer(x, **extras(layer, ids))[0][:, ROWS]
    assert some.shape == (2, len(ROWS), HIDDEN)
    assert relative_rms(some, whole) < 1e-12
    probe = torch.randn_like(whole)
    expected = gradients(layer, x, whole, probe)
    for key, grad in gradients(layer, x, some, probe).items():
        assert (grad is None) == (expected[key] is None), key
        assert grad is None or relative_rms(grad, expected[key]) < 1e-10, key


@pytest.mark.parametrize("name", ["smat", "smat gated", "smat content", "mamba2", "mamba2 memory"])
def test_rows_with_padding_packing_and_a_cache(name):
    layer = make(name)
    x, _ = tokens(2, 20)
    real = torch.ones(2, 20)
    real[0, :3], real[1, 15:] = 0, 0
    with torch.no_grad():
        padded = layer(x, real)[0]
        assert relative_rms(layer(x, real, positions=ROWS)[0], padded[:, ROWS]) < 1e-12
        edges = torch.tensor([0, 5, 5, 20])
        packed = layer(x[:1], cu_seqlens=edges)[0]
        rows = layer(x[:1], cu_seqlens=edges, positions=ROWS)[0]
        assert relative_rms(rows, packed[:, ROWS]) < 1e-12
        out, _, cache = layer(x[:, :14], use_cache=True, positions=ROWS[1:3])
        assert relative_rms(out, layer(x)[0][:, ROWS[1:3]]) < 1e-12
        later = layer(x[:, 14:], None, cache, positions=torch.tensor([5, 0]))[0]
        assert relative_rms(later, layer(x)[0][:, [19, 14]]) < 1e-10


def test_rows_without_a_horizon():
    torch.manual_seed(0)
    layer = SMatAttention(HIDDEN, num_heads=2, vc_dim=2, chunk_size=4).double()
    x, _ = tokens(1, 40)
    edges = torch.tensor([0, 16, 40])
    rows = torch.tensor([39, 15, 20])
    for packing in ({}, {"cu_seqlens": edges}):
        whole = layer(x, **packing)[0]
        assert relative_rms(layer(x, positions=rows, **packing)[0], whole[:, rows]) < 1e-12


def test_bad_positions_are_refused_with_their_numbers():
    layer = make("smat")
    x, _ = tokens(1, 20)
    with pytest.raises(ValueError, match=r"20\), got values from 3 to 20"):
        layer(x, positions=torch.tensor([3, 20]))
    with pytest.raises(ValueError, match=r"got shape \(1, 2\)"):
        layer(x, positions=torch.tensor([[3, 4]]))
