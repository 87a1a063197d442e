"""A learned direction through a hashed cell: what it reads, and what learns."""

import pytest
import torch

from smat.layers import DirectedRouting, SMatAttention
from smat.masks import SMatMask, type_through_cell
from smat.masks.assignment import TokenHash

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
HEADS, HIDDEN, VOCAB = 2, 8, 16


def make_layer(**options):
    torch.manual_seed(0)
    mask = SMatMask(32, vc_dim=3, chunk_size=8, field_size=3)
    routing = DirectedRouting(HIDDEN, mask.geometry, vocab_size=VOCAB, num_heads=HEADS, write_lag=1)
    layer = SMatAttention(
        HIDDEN, num_heads=HEADS, vc_dim=3, horizon=32, chunk_size=8, field_size=3,
        routing=routing, **options,
    ).double()  # fmt: skip
    return layer, torch.randn(2, 32, HIDDEN).double(), torch.randint(VOCAB, (2, 32))


def test_the_chosen_plane_goes_through_the_own_cell():
    layer, x, ids = make_layer()
    seen = []
    layer.routing.register_forward_hook(lambda module, given, result: seen.append(result[0]))
    layer(x, token_ids=ids)
    geometry = layer.recipe.geometry
    queries = layer.qkv_proj(x)[..., :HIDDEN]
    direction = layer.routing.selector.scorer(queries).view(2, 32, HEADS, -1).argmax(-1)
    cell = TokenHash(VOCAB, HEADS, geometry, 0).profile(ids)
    expected = type_through_cell(geometry, direction, cell)
    assert torch.equal(seen[0].query_type.squeeze(-1), expected)
    assert (seen[0].read_weight == 1).all()


def test_scores_learn_from_recent_rows_alone():
    layer, x, ids = make_layer()
    x.requires_grad_()
    out, _, _ = layer(x, token_ids=ids)
    weight = layer.routing.selector.scorer.weight
    (early,) = torch.autograd.grad(out[:, :16].square().sum(), weight, retain_graph=True)
    (late,) = torch.autograd.grad(out[:, 16:].square().sum(), weight)
    assert (early == 0).all()
    assert (late != 0).any()


def test_rows_alone_and_steps_equal_the_whole():
    layer, x, ids = make_layer()
    whole, _, _ = layer(x, token_ids=ids)
    rows = torch.tensor([31, 4, 20])
    some, _, _ = layer(x, token_ids=ids, positions=rows)
    torch.testing.assert_close(some, whole[:, rows], rtol=1e-10, atol=1e-10)
    _, _, cache = layer(x[:, :20], token_ids=ids[:, :20], use_cache=True)
    for t in range(20, 32):
        out, cache = layer.step(x[:, t], cache, token_ids=ids[:, t])
        torch.testing.assert_close(out, whole[:, t], rtol=1e-10, atol=1e-10)


def test_a_direction_sees_the_tokens_that_the_convolution_sees():
    layer, x, ids = make_layer(conv_size=3)
    chosen = []
    layer.routing.register_forward_hook(lambda module, given, result: chosen.append(result[0]))
    for before in range(4):  # tokens before the asking one that change
        changed = x.clone()
        changed[:, 31 - before : 31] = 5 * torch.randn(2, before, HIDDEN).double()
        layer(changed, token_ids=ids)
    first, *others = (each.query_type[:, 31] for each in chosen)
    assert any(not torch.equal(first, each) for each in others)
