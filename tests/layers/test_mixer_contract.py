"""What every layer promises: causality, padding, packing, decoding, initialisation, dtypes."""

import warnings

import pytest
import torch

from smat.layers import MixerCache, SMatAttention
from tests.layers.mixers import (
    HIDDEN,
    LAYERS,
    ROUNDING_ROUTES,
    STRAIGHT_THROUGH,
    extras,
    make,
    relative_rms,
    tokens,
    unpacked,
)

each_layer = pytest.mark.parametrize("name", LAYERS)
pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
EXACT = 1e-10


@each_layer
def test_a_token_changes_no_output_before_it(name):
    layer = make(name)
    x, ids = tokens(2, 20)
    whole = layer(x, **extras(layer, ids))[0]
    for changed in (0, 7, 8, 13, 19):
        other, other_ids = x.clone(), ids.clone()
        other[:, changed] += 1
        other_ids[:, changed] = (ids[:, changed] + 1) % 7
        out = layer(other, **extras(layer, other_ids))[0]
        if name == "mixture of memories":  # products have other shapes where routes change
            assert (out - whole)[:, :changed].abs().sum() < 1e-13
        else:
            assert torch.equal(out[:, :changed], whole[:, :changed])
        assert not torch.allclose(out[:, changed], whole[:, changed])


@each_layer
def test_prefill_then_steps_equals_forward_at_every_split(name):
    layer = make(name)
    x, ids = tokens(2, 20)
    with torch.no_grad():
        whole = layer(x, **extras(layer, ids))[0]
        for split in range(20):
            cache, outputs = None, []
            if split:
                out, _, cache = layer(x[:, :split], use_cache=True, **extras(layer, ids[:, :split]))
                outputs.append(out)
            for t in range(split, min(20, split + 6) if split else 20):
                out, cache = layer.step(x[:, t], cache, **extras(layer, ids[:, t]))
                outputs.append(out.unsqueeze(1))
            found = torch.cat(outputs, 1)
            assert relative_rms(found, whole[:, : found.shape[1]]) < EXACT, split


@each_layer
def test_several_tokens_after_a_cache_equal_forward(name):
    layer = make(name)
    x, ids = tokens(2, 20)
    with torch.no_grad():
        whole = layer(x, **extras(layer, ids))[0]
        for split in (3, 8, 12):
            cache = layer(x[:, :split], use_cache=True, **extras(layer, ids[:, :split]))[2]
            out, _, after = layer(
                x[:, split:], past_key_values=cache, use_cache=True, **extras(layer, ids[:, split:])
            )
            assert relative_rms(out, whole[:, split:]) < EXACT
            assert after.num_tokens.tolist() == [20, 20]
            # The first cache still stands for the tokens before.
            again = layer(x[:, split:], past_key_values=cache, **extras(layer, ids[:, split:]))[0]
            assert torch.equal(again, out)


@each_layer
def test_padding_on_either_side_changes_nothing(name):
    layer = make(name)
    x, ids = tokens(3, 15)
    real = torch.ones(3, 15, dtype=torch.long)
    real[0, :4], real[1, 11:] = 0, 0
    real[2, :2], real[2, 13:] = 0, 0
    poisoned = x.masked_fill((real == 0).unsqueeze(-1), torch.nan)
    more, more_ids = tokens(3, 2, seed=5)
    with torch.no_grad():
        out, _, cache = layer(poisoned, real, use_cache=True, **extras(layer, ids))
        after, _, later = layer(
            more, real.new_tensor([[1, 1], [0, 1], [1, 0]]), cache, True, **extras(layer, more_ids)
        )
        last, _ = layer.step(more[:, 0], later, **extras(layer, more_ids[:, 0]))
        assert torch.equal(out[real == 0], torch.zeros_like(out[real == 0]))
        for row, new in enumerate(([0, 1], [1], [0])):
            kept = real[row].bool()
            alone = torch.cat([x[row, kept], more[row, new], more[row, :1]]).unsqueeze(0)
            alone_ids = torch.cat([ids[row, kept], more_ids[row, new], more_ids[row, :1]])
            expected = layer(alone, **extras(layer, alone_ids.unsqueeze(0)))[0][0]
            length = int(kept.sum())
            assert relative_rms(out[row, kept], expected[:length]) < EXACT
            assert relative_rms(after[row, new], expected[length:-1]) < EXACT
            assert relative_rms(last[row], expected[-1]) < EXACT


@each_layer
def test_packed_sequences_give_what_each_gives_alone(name):
    layer = make(name)
    x, ids = tokens(1, 30)
    edges = [0, 1, 14, 14, 30]
    packed = torch.tensor(edges)
    out, _, cache = layer(x, cu_seqlens=packed, use_cache=True, **extras(layer, ids))
    more, more_ids = tokens(4, 1, seed=3)
    with torch.no_grad():
        step, _ = layer.step(more[:, 0], cache, **extras(layer, more_ids[:, 0]))
    parts = zip(unpacked(x, edges), unpacked(ids, edges), unpacked(out, edges), strict=True)
    for row, (one, one_ids, found) in enumerate(parts):
        alone = torch.cat([one, more[row : row + 1]], 1)
        alone_ids = torch.cat([one_ids, more_ids[row : row + 1]], 1)
        expected = layer(alone, **extras(layer, alone_ids))[0]
        if found.shape[1]:
            assert relative_rms(found, expected[:, :-1]) < EXACT
        assert relative_rms(step[row], expected[0, -1]) < EXACT


@each_layer
def test_padding_has_no_gradient(name):
    layer = make(name)
    x, ids = tokens(2, 12)
    x.requires_grad_()
    real = torch.ones(2, 12)
    real[0, :3], real[1, 9:] = 0, 0
    layer(x, real, **extras(layer, ids))[0].square().sum().backward()
    assert torch.equal(x.grad[real == 0], torch.zeros_like(x.grad[real == 0]))
    for key, parameter in layer.named_parameters():
        # Without a straight-through weight a hash learns nothing of what is written.
        learns = name in STRAIGHT_THROUGH and "request" not in name
        assert parameter.grad is not None or (not learns and ".learned." in key)
        assert parameter.grad is None or torch.isfinite(parameter.grad).all()


@each_layer
def test_parameters_are_drawn_again_after_the_meta_device(name):
    torch.manual_seed(3)
    layer = LAYERS[name]()
    torch.manual_seed(3)
    layer.reset_parameters()
    first = {key: value.clone() for key, value in layer.state_dict().items()}
    with torch.device("meta"):
        empty = LAYERS[name]()
    empty = empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        parameter.data.fill_(torch.nan)
    torch.manual_seed(3)
    empty.reset_parameters()
    assert empty.state_dict().keys() == first.keys()
    for key, value in empty.state_dict().items():
        assert torch.equal(value, first[key]), key
    marked = {key for key, value in layer.named_parameters() if hasattr(value, "_no_weight_decay")}
    again = {key for key, value in empty.named_parameters() if hasattr(value, "_no_weight_decay")}
    assert marked == again >= {key for key in first if key in ("A_log", "dt_bias", "D")}


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in STRAIGHT_THROUGH])
def test_gradients_agree_with_differences(name):
    layer = make(name)
    x, ids = tokens(1, 11)
    parameters = list(layer.parameters())

    def run(x, *weights):
        names = [key for key, _ in layer.named_parameters()]
        values = dict(zip(names, weights, strict=True))
        return torch.func.functional_call(layer, values, (x,), extras(layer, ids))[0]

    inputs = (x.requires_grad_(), *(p.detach().requires_grad_() for p in parameters))
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


@each_layer
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_stays_near_full_precision(name, autocast):
    full = make(name)
    x, ids = tokens(2, 20)
    expected = full(x, **extras(full, ids))[0]
    layer = make(name, torch.float32 if autocast else torch.bfloat16)
    x = x.to(torch.float32 if autocast else torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out, _, cache = layer(x, use_cache=True, **extras(layer, ids))
        step, _ = layer.step(x[:, -1], cache, **extras(layer, ids[:, -1]))
    assert out.dtype == step.dtype == torch.bfloat16
    assert relative_rms(out, expected) < (0.5 if name in ROUNDING_ROUTES else 0.05)
    out.float().square().sum().backward()
    assert torch.isfinite(x.grad).all()


@each_layer
def test_rows_of_a_cache_can_be_chosen(name):
    layer = make(name)
    x, ids = tokens(3, 9)
    rows = [2, 0, 2]
    with torch.no_grad():
        cache = layer(x[:, :8], use_cache=True, **extras(layer, ids[:, :8]))[2]
        out, _ = layer.step(x[rows, 8], cache.select(rows), **extras(layer, ids[rows, 8]))
        expected = layer(x[rows], **extras(layer, ids[rows]))[0][:, 8]
    assert relative_rms(out, expected) < EXACT


def test_bad_tokens_are_refused_with_their_numbers():
    layer = make("mamba2")
    x, _ = tokens(2, 5)
    for arguments, numbers in (
        ({"hidden_states": x[0]}, r"\(5, 12\)"),
        ({"hidden_states": x, "attention_mask": torch.ones(2, 4)}, r"\(2, 4\)"),
        ({"hidden_states": x, "cu_seqlens": torch.tensor([0, 5])}, r"\[0, 5\]"),
        ({"hidden_states": x[:1], "cu_seqlens": torch.tensor([0, 7])}, r"\[0, 7\]"),
        ({"hidden_states": x, "past_key_values": MixerCache(torch.zeros(3))}, "3 rows"),
    ):
        with pytest.raises(ValueError, match=numbers):
            layer(**arguments)


def test_importing_the_layers_needs_nothing_but_torch():
    assert SMatAttention(HIDDEN, num_heads=2, vc_dim=1).horizon is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make("smat")(tokens(1, 3)[0])[0].shape == (1, 3, HIDDEN)
