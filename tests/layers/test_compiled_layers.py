"""Layers as compilers see them: one graph, the same numbers and gradients."""

import pytest
import torch

from tests.layers.mixers import make, relative_rms, tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore::smat.SMatWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.mark.parametrize(
    "name",
    [
        "smat",
        "smat gated",
        "smat window",
        "smat content",
        "mamba2",
        "gated deltanet",
        "softmax",
        "routed mamba2",
        "routed mamba2 convolved",
        "routed mamba2 paper",
        "routed mamba2 request",
        "routed mamba2 scored request",
        "routed deltanet",
    ],
)
def test_one_graph_without_breaks(name):
    torch.compiler.reset()
    layer = make(name, torch.float32)
    compiled = torch.compile(lambda x: layer(x)[0], fullgraph=True, backend="aot_eager")
    x = tokens(2, 20, torch.float32)[0].requires_grad_()
    expected, found = layer(x)[0], compiled(x)
    assert relative_rms(found, expected) < 1e-6
    probe = torch.randn_like(expected)
    leaves = [x, *(each for each in layer.parameters() if each.requires_grad)]
    grads = [
        torch.autograd.grad((out * probe).sum(), leaves, allow_unused=True)
        for out in (found, expected)
    ]
    for one, other in zip(*grads, strict=True):
        if other is None:  # of a hash that learns from its balance loss alone
            assert one is None or not one.any()
        else:
            assert relative_rms(one, other) < 1e-5


@pytest.mark.parametrize("name", ["smat", "smat content"])
def test_rows_compile_too(name):
    torch.compiler.reset()
    layer = make(name, torch.float32)
    rows = torch.tensor([3, 19, 3])
    compiled = torch.compile(
        lambda x: layer(x, positions=rows)[0], fullgraph=True, backend="aot_eager"
    )
    x, _ = tokens(2, 20, torch.float32)
    assert relative_rms(compiled(x), layer(x)[0][:, rows]) < 1e-6
