"""Converted models give the logits of those that they were made of."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM

from smat.models.hf import SMatForCausalLM, convert_gated_deltanet, convert_mamba2

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
SIZES = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 4, "chunk_size": 8}


def make_mamba2(**options):
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(
        Mamba2Config(vocab_size=32, num_hidden_layers=2, **{**SIZES, **options})
    ).eval()
    with torch.no_grad():
        for x in model.parameters():
            if x.ndim == 1:  # so that no default hides a weight in the wrong place
                x.add_(0.3 * torch.randn_like(x))
        for layer in model.backbone.layers:
            layer.mixer.dt_bias.add_(4)  # large steps: the state is heard
    return model


IDS = torch.randint(32, (2, 21), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def difference(theirs, ours):
    return float((theirs(IDS).logits - ours(IDS).logits).norm() / theirs(IDS).logits.norm())


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_bias": True, "tie_word_embeddings": True},
        {"use_conv_bias": False, "layer_norm_epsilon": 1e-3},
    ],
)
def test_logits_equal_those_of_transformers(groups, options):
    theirs = make_mamba2(n_groups=groups, **options)
    ours = convert_mamba2(theirs)
    assert difference(theirs, ours) < 1e-5
    expected = theirs.generate(IDS, max_new_tokens=6, do_sample=False)
    assert torch.equal(ours.generate(IDS, max_new_tokens=6, do_sample=False), expected)
    if groups > 1:  # one norm a group, as mamba_ssm has, is another model
        assert difference(theirs, convert_mamba2(theirs, grouped_norm=True)) > 0.01


class GroupedNorm(nn.Module):
    """The norm of mamba_ssm: gate, then norm group by group."""

    def __init__(self, plain, groups):
        super().__init__()
        self.weight, self.eps, self.groups = plain.weight, plain.variance_epsilon, groups

    def forward(self, x, gate):
        x = (x * F.silu(gate)).unflatten(-1, (self.groups, -1))
        return self.weight * F.rms_norm(x, x.shape[-1:], eps=self.eps).flatten(-2)


def test_one_norm_a_group_is_that_of_mamba_ssm():
    theirs = make_mamba2(n_groups=2)
    ours = convert_mamba2(theirs, grouped_norm=True)
    for layer in theirs.backbone.layers:
        layer.mixer.norm = GroupedNorm(layer.mixer.norm, 2)
    assert difference(theirs, ours) < 1e-5


def test_heads_that_take_groups_in_turn_are_put_side_by_side(monkeypatch):
    theirs = make_mamba2(n_groups=2, use_bias=True)
    plain, untiled = convert_mamba2(theirs), convert_mamba2(theirs, tiled_heads=True)

    def tile(x, repeats, dim=None, *, output_size=None):
        return torch.cat([x] * repeats, dim)

    monkeypatch.setattr(torch.Tensor, "repeat_interleave", tile)  # as fla's prefill repeats groups
    with torch.no_grad():
        expected = theirs(IDS, use_cache=False).logits
    monkeypatch.undo()
    with torch.no_grad():
        torch.testing.assert_close(untiled(IDS).logits, expected, rtol=1e-4, atol=1e-4)
        assert (plain(IDS).logits - expected).norm() > 0.01 * expected.norm()


def test_a_converted_model_can_be_given_a_memory(tmp_path):
    theirs = make_mamba2(n_groups=2)
    window = {"kind": "window", "step": 16}
    ours = convert_mamba2(theirs, {"vc_dim": 2, "boundary": window}, context_length=64)
    assert difference(theirs, ours) < 1e-5  # 21 tokens see nothing distant in a window of 16
    long = torch.randint(32, (1, 64))
    loss = ours.train()(long, labels=long).loss
    loss.backward()
    assert all(x.grad is not None for x in ours.model.layers[0].mixer.memory.parameters())
    ours.save_pretrained(tmp_path)
    assert difference(theirs, SMatForCausalLM.from_pretrained(tmp_path)) < 1e-5


def test_what_cannot_be_followed_is_refused():
    with pytest.raises(ValueError, match=r"time_step_limit = \(0\.0, 0\.1\)"):
        convert_mamba2(make_mamba2(time_step_limit=(0.0, 0.1)))
    with pytest.raises(ValueError, match="no norm of a group"):
        convert_mamba2(make_mamba2(), grouped_norm=True, tiled_heads=True)


fla = pytest.importorskip("fla")


def gated_deltanet_by_definition(layer, x):
    """Compute flash-linear-attention's layer with its slow functions, which need no GPU."""
    from fla.ops.gated_delta_rule.naive import naive_recurrent_gated_delta_rule

    def convolved(projection, conv):
        y = F.pad(projection(x).mT, (conv.kernel_size[0] - 1, 0))
        return F.silu(F.conv1d(y, conv.weight, groups=conv.weight.shape[0])).mT

    q, k, v = (
        convolved(getattr(layer, f"{name}_proj"), getattr(layer, f"{name}_conv1d"))
        .unflatten(-1, (layer.num_heads, -1))
        for name in "qkv"
    )  # fmt: skip
    q, k = (y * (y.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for y in (q, k))
    beta = layer.b_proj(x).sigmoid() * (2 if layer.allow_neg_eigval else 1)
    decay = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    out, _ = naive_recurrent_gated_delta_rule(q, k, v, beta, decay)
    out = F.rms_norm(out, out.shape[-1:], layer.o_norm.weight, layer.o_norm.eps)
    if layer.use_gate:
        out = out * F.silu(layer.g_proj(x)).view_as(out)
    return layer.o_proj(out.flatten(-2))


@pytest.mark.parametrize(
    "options", [{}, {"use_gate": False, "expand_v": 1}, {"allow_neg_eigval": True}]
)
def test_a_layer_of_flash_linear_attention_is_taken_over(options):
    from fla.layers import GatedDeltaNet

    torch.manual_seed(0)
    theirs = GatedDeltaNet(16, head_dim=6, num_heads=2, layer_idx=3, **options)
    with torch.no_grad():
        theirs.o_norm.weight.uniform_(0.5, 1.5)
    ours, x = convert_gated_deltanet(theirs), torch.randn(2, 19, 16)
    assert ours.layer_idx == 3
    with torch.no_grad():
        expected = gated_deltanet_by_definition(theirs, x)
        torch.testing.assert_close(ours(x)[0], expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="num_v_heads = 4 of 2 heads"):
        convert_gated_deltanet(GatedDeltaNet(16, head_dim=6, num_heads=2, num_v_heads=4))
