"""What no layer takes in silence: unknown arguments, foreign objects, numbers not finite."""

import pytest
import torch

import smat
from smat.layers import MixtureOfMemories, SMatAttention, SoftmaxAttention, sum_balance_losses
from tests.layers.mixers import HIDDEN, LAYERS, extras, make, tokens

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
each_layer = pytest.mark.parametrize("name", LAYERS)
LEARNED = [name for name in LAYERS if name.startswith(("smat content", "routed", "mixture"))]


@each_layer
def test_an_unknown_argument_is_named(name):
    layer, (x, ids) = make(name), tokens(1, 5)
    for unknown in ({"cu_seqlen": torch.tensor([0, 5])}, {"cells": ids}):
        with pytest.raises(TypeError, match=f"{type(layer).__name__}.*{next(iter(unknown))}"):
            layer(x, **unknown, **extras(layer, ids))


@each_layer
def test_an_input_that_another_layer_takes_is_unknown_too(name):
    layer, (x, ids) = make(name), tokens(1, 5)
    for key, value in (("token_ids", ids), ("mask", smat.SMatMask(22, 3, 4))):
        if key not in layer.extra_inputs:
            with pytest.raises(TypeError, match=key):
                layer(x, **{key: value})


@each_layer
@pytest.mark.parametrize(
    ("mask", "number"),
    [(torch.full((1, 5), 0.5), "0.5"), (torch.full((1, 5), torch.nan), "nan"),
     (torch.tensor([[0.0, 0.0, 0.0, -torch.inf, 0.0]]), "-inf"), (torch.full((1, 5), 2), "2")],
)  # fmt: skip
def test_an_attention_mask_holds_zeros_and_ones(name, mask, number):
    layer, (x, ids) = make(name), tokens(1, 5)
    with pytest.raises(ValueError, match=f"0 for padding and 1.*{number}"):
        layer(x, mask, **extras(layer, ids))


@each_layer
def test_foreign_objects_are_refused_by_their_type(name):
    layer, (x, ids) = make(name), tokens(2, 5)
    for arguments, kind in (
        ({"hidden_states": x.tolist()}, "list"),
        ({"hidden_states": x, "past_key_values": {"state": x}}, "dict"),
        ({"hidden_states": x, "attention_mask": [[1] * 5] * 2}, "list"),
        ({"hidden_states": x[:1], "cu_seqlens": [0, 5]}, "list"),
    ):
        with pytest.raises(TypeError, match=kind):
            layer(**arguments, **extras(layer, ids[: len(arguments["hidden_states"])]))
    with pytest.raises(ValueError, match=r"\(B, T, 12\).*\(2, 5, 11\)"):
        layer(x[..., 1:], **extras(layer, ids))


@each_layer
def test_every_tensor_is_on_the_device_of_the_layer(name):
    layer, (x, ids) = make(name), tokens(1, 5)
    given = {"hidden_states": x, "positions": torch.tensor([1, 4]), **extras(layer, ids)}
    for argument, value in given.items():
        with pytest.raises(ValueError, match=f"{argument} must be on cpu as .*, got meta"):
            layer(**given | {argument: value.to("meta")})


def test_a_direction_that_hashed_routing_cannot_take_is_named():
    x, ids = tokens(2, 5)
    right, layer = torch.zeros(2, 5, 2).long(), make("smat hashed direction")
    layer(x, token_ids=ids, query_direction=right)
    for wrong, message in (
        (right[:, 1:], r"of shape \(2, 5, 2\), got \(2, 4, 2\)"),
        (right.float(), "must hold integers, got torch.float32"),
        (right + 4, r"must lie in \[0, 4\), got values from 4 to 4"),
        ([0, 1], "must be a tensor, got list"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"query_direction {message}"):
            layer(x, token_ids=ids, query_direction=wrong)
    with pytest.raises(TypeError, match="query_direction"):  # it reads its own cell alone
        make("smat bucketed")(x, token_ids=ids, query_direction=right)


def test_an_empty_packing_is_refused():
    x, _ = tokens(1, 5)
    with pytest.raises(ValueError, match=r"cu_seqlens.*\[\]"):
        make("mamba2")(x, cu_seqlens=torch.tensor([], dtype=torch.long))


@pytest.mark.parametrize("kind", [SMatAttention, SoftmaxAttention])
def test_heads_divide_the_width_unless_theirs_is_given(kind):
    with pytest.raises(ValueError, match="64 makes no 3 heads"):
        kind(64, num_heads=3)
    assert kind(64, num_heads=3, head_dim=20).head_dim == 20


@each_layer
def test_what_follows_a_cache_is_not_differentiated(name):
    layer, (x, ids) = make(name), tokens(2, 12)
    out, _, cache = layer(x[:, :9], use_cache=True, **extras(layer, ids[:, :9]))
    out.sum().backward()  # the call that begins has its gradient
    later = layer(x[:, 9:], past_key_values=cache, **extras(layer, ids[:, 9:]))[0]
    with pytest.raises(RuntimeError, match="a cache carries no gradient"):
        later.sum().backward()
    for nothing_to_learn in (torch.no_grad(), torch.inference_mode()):
        with nothing_to_learn:
            again = layer(x[:, 9:], past_key_values=cache, **extras(layer, ids[:, 9:]))[0]
            assert not again.requires_grad
            assert torch.equal(again, later)
    with pytest.raises(RuntimeError, match=r"torch\.no_grad"):
        layer.step(x[:, 9], cache, **extras(layer, ids[:, 9]))[0].sum().backward()
    layer.requires_grad_(False)
    x.requires_grad_()
    later = layer(x[:, 9:], past_key_values=cache, **extras(layer, ids[:, 9:]))[0]
    with pytest.raises(RuntimeError, match="a cache carries no gradient"):
        later.sum().backward()


@each_layer
def test_a_call_of_padding_alone_gives_zeros_and_changes_nothing(name):
    layer, (x, ids) = make(name), tokens(2, 10)
    nothing = torch.zeros(2, 10)
    with torch.no_grad():
        out, _, cache = layer(x, nothing, use_cache=True, **extras(layer, ids))
        assert torch.equal(out, torch.zeros_like(out))
        expected = layer(x, **extras(layer, ids))[0]
        again = layer(x, None, cache, **extras(layer, ids))[0]
        torch.testing.assert_close(again, expected, rtol=1e-10, atol=1e-10)
    out = layer(x, nothing, **extras(layer, ids))[0]
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())


def test_a_mixture_of_memories_has_no_loss_for_padding_alone():
    layer = MixtureOfMemories(HIDDEN, 5, num_chosen=2, num_heads=2, head_dim=4)
    layer(torch.randn(2, 4, HIDDEN), torch.zeros(2, 4))
    assert layer.balance_loss.item() == 0


@each_layer
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e20])
@pytest.mark.parametrize("place", [2, 15])
def test_one_wild_number_gives_no_exception(name, value, place):
    layer = make(name, torch.float32)
    x, ids = tokens(2, 20, torch.float32)
    x[0, place, 3] = value
    x.requires_grad_()
    out, _, _ = layer(x, **extras(layer, ids))
    assert value == 1e20 or not out[0].isfinite().all()
    assert out[1].isfinite().all()
    balance = sum_balance_losses(layer)
    assert balance is not None or name not in LEARNED
    (out.sum() if balance is None else out.sum() + balance).backward()
    with torch.no_grad():
        _, _, cache = layer(x[:, :10], use_cache=True, **extras(layer, ids[:, :10]))
        for t in range(10, 20):
            step, cache = layer.step(x[:, t], cache, **extras(layer, ids[:, t]))
            assert step[1].isfinite().all()


@pytest.mark.parametrize("name", ["smat", "smat window", "routed mamba2", "routed deltanet"])
def test_a_repr_shows_the_mask(name):
    text = repr(make(name))
    boundary = "window(step=4)" if "window" in name else "kept(8)"
    assert f"vc_dim=3, horizon=22, boundary={boundary}" in text
    assert "vc_dim=3, horizon=None, boundary=rebuilt()" in repr(SMatAttention(HIDDEN))
