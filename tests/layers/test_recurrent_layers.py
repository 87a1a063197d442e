"""Mamba-2, Gated DeltaNet, DeltaNet and log-linear layers, token by token and against peers."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import smat
from smat.layers import (
    DeltaNet,
    GatedDeltaNet,
    LogLinearGatedDeltaNet,
    LogLinearMamba2,
    Mamba2,
    ProfileMemory,
    TransportedMemory,
)
from smat.ops.delta_rule.reference import delta_rule_reference
from smat.ops.log_linear.reference import decay_reference, log_linear_reference
from tests.layers.memory_definition import define
from tests.layers.mixers import convolve, distant, make, relative_rms, tokens

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
PEER = 1e-5


def l2(x):
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def rms_norm(x, eps=1e-5):
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def mamba2_inputs(layer, x, conv=convolve):
    """Write the projections of Mamba-2 out: z, x, B, C, step."""
    inner, shared, heads = layer.inner_size, layer.num_groups * layer.state_dim, layer.num_heads
    z, xbc, raw = layer.in_proj(x).split([inner, inner + 2 * shared, heads], -1)
    value, b, c = conv(xbc, layer.conv).split([inner, shared, shared], -1)
    groups = (layer.num_groups, layer.state_dim)
    b, c = b.unflatten(-1, groups), c.unflatten(-1, groups)
    return z, value.unflatten(-1, (heads, -1)), b, c, raw


def mamba2_output(layer, y, z):
    gated = (y.flatten(-2) * F.silu(z)).unflatten(-1, (layer.num_groups, -1))
    return layer.out_proj(rms_norm(gated).flatten(-2) * layer.norm.weight)


def mamba2_by_tokens(layer, x, recur=decay_reference):
    z, value, b, c, raw = mamba2_inputs(layer, x)
    step = F.softplus(raw + layer.dt_bias)
    b, c = (g.repeat_interleave(layer.num_heads // layer.num_groups, 2) for g in (b, c))
    found = recur(c, b, value * step.unsqueeze(-1), -layer.A_log.exp() * step)
    y, state = found if isinstance(found, tuple) else (found, None)
    return mamba2_output(layer, y + layer.D.unsqueeze(-1) * value, z), state


def delta_inputs(layer, x, conv=convolve):
    parts = conv(layer.qkv_proj(x), layer.conv).split(layer.widths, -1)
    q, k, v = (part.unflatten(-1, (layer.num_heads, -1)) for part in parts)
    beta = layer.b_proj(x).sigmoid() * (2 if layer.allow_neg_eigval else 1)
    if layer.a_proj is None:
        return l2(q), l2(k), v, beta, None
    return l2(q), l2(k), v, beta, -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)


def delta_output(layer, y, x):
    y = rms_norm(y) * layer.norm.weight
    if layer.g_proj is not None:
        y = y * F.silu(layer.g_proj(x)).view_as(y)
    return layer.o_proj(y.flatten(-2))


def state_of(cache):
    state = cache["state"]
    return state.tensors["recent"][0] if isinstance(state, smat.SMatState) else state


def test_mamba2_equals_its_recurrence():
    layer = make("mamba2")
    x, _ = tokens(2, 70)
    out, _, cache = layer(x, use_cache=True)
    expected, state = mamba2_by_tokens(layer, x)
    assert relative_rms(out, expected) < 1e-12
    assert relative_rms(state_of(cache), state) < 1e-12


@pytest.mark.parametrize("name", ["gated deltanet", "deltanet"])
def test_delta_layers_equal_their_recurrence(name):
    layer = make(name)
    x, _ = tokens(2, 70)
    out, _, cache = layer(x, use_cache=True)
    y, state = delta_rule_reference(*delta_inputs(layer, x))
    assert relative_rms(out, delta_output(layer, y, x)) < 1e-12
    assert relative_rms(cache["state"], state) < 1e-12


def test_log_linear_mamba2_equals_its_definition():
    layer = make("log-linear mamba2")
    x, _ = tokens(2, 37)
    weights = F.softplus(layer.level_weights.proj(x).view(2, 37, 4, 4) * layer.level_weights.scale)
    expected, _ = mamba2_by_tokens(
        layer, x, lambda q, k, v, g: log_linear_reference(q, k, v, weights, g)
    )
    assert relative_rms(layer(x)[0], expected) < 1e-12


def test_log_linear_deltanet_equals_its_definition():
    layer = make("log-linear deltanet")
    x, _ = tokens(2, 37)
    weights = F.softplus(layer.level_weights.proj(x).view(2, 37, 2, 7) * layer.level_weights.scale)
    q, k, v, beta, log_decay = delta_inputs(layer, x)
    y = log_linear_reference(q, k, v, weights, log_decay, beta)
    assert relative_rms(layer(x)[0], delta_output(layer, y, x)) < 1e-12


@pytest.mark.parametrize(
    ("leveled", "plain", "options"),
    [
        (
            LogLinearMamba2,
            Mamba2,
            {"state_dim": 3, "head_dim": 6, "bias": True, "conv_bias": False},
        ),
        (LogLinearGatedDeltaNet, GatedDeltaNet, {"num_heads": 2, "head_dim": 4}),
    ],
)
def test_equal_level_weights_give_the_plain_backbone(leveled, plain, options):
    torch.manual_seed(0)
    extra = {"scale": 4**-0.5} if plain is GatedDeltaNet else {}
    layer = leveled(12, **options, **extra).double()
    layer.level_weights.register_forward_hook(lambda *found: torch.ones_like(found[2]))
    backbone = plain(12, **options).double()
    backbone.load_state_dict(layer.state_dict(), strict=False)
    x, _ = tokens(2, 70)
    assert relative_rms(layer(x)[0], backbone(x)[0]) < 1e-12


def test_gated_deltanet_without_decay_is_deltanet():
    layer = make("deltanet")
    gated = GatedDeltaNet(
        12, num_heads=2, head_dim=4, expand_v=1, output_gate=False, allow_neg_eigval=True
    ).double()
    gated.load_state_dict(layer.state_dict(), strict=False)
    torch.nn.init.constant_(gated.A_log, -torch.inf)
    x, _ = tokens(2, 40)
    assert isinstance(layer, DeltaNet)
    assert relative_rms(gated(x)[0], layer(x)[0]) < 1e-12


def beside_silence(name, boundary):
    """Make a layer whose memory reads nothing, and the same layer without a memory."""
    layer = make(f"{name} memory")
    torch.nn.init.constant_(layer.memory.read_gate.head_logit, -1e4)
    layer.memory.mask = smat.SMatMask(22, 3, 4, field_size=3, boundary=boundary)
    plain = make(name)
    own = {k: v for k, v in layer.state_dict().items() if not k.startswith("memory")}
    plain.load_state_dict(own)
    return layer, plain


@pytest.mark.parametrize("name", ["mamba2", "gated deltanet"])
def test_beside_a_memory_state_and_convolution_are_reset_at_the_boundary(name):
    layer, plain = beside_silence(name, smat.schedules.kept(8))
    x, _ = tokens(2, 20)
    expected = torch.cat([plain(x[:, :8])[0], plain(x[:, 8:])[0]], 1)
    assert relative_rms(layer(x)[0], expected) < 1e-12


def convolve_apart(x, conv):
    return torch.cat([convolve(each, conv) for each in (x[:, :8], x[:, 8:])], 1)


@pytest.mark.parametrize("settings", ["", " paper"])
@pytest.mark.parametrize("name", ["routed mamba2", "routed deltanet"])
def test_a_layer_with_a_memory_is_the_reset_backbone_plus_what_the_memory_reads(name, settings):
    layer, x = make(name + settings), tokens(2, 20)[0]
    mask = layer.memory.mask
    if name == "routed mamba2":
        z, value, b, c, raw = mamba2_inputs(layer, x, convolve_apart)
        step = F.softplus(raw + layer.dt_bias)
        b, c = (g.repeat_interleave(layer.num_heads // layer.num_groups, 2) for g in (b, c))
        q, k, v, beta, log_decay = c, b, value * step.unsqueeze(-1), None, -layer.A_log.exp() * step
    else:
        q, k, v, beta, log_decay = delta_inputs(layer, x, convolve_apart)
    given = {"hidden": x, "q": q, "k": k, "v": v, "beta": beta, "log_decay": log_decay}
    if name == "routed mamba2" and not settings:
        given["v"] = value
    read = define(layer.memory, given, mask)
    assert read[:, 8:].abs().max() > 1e-6
    reset = log_decay.clone()
    reset[:, 8] = -torch.inf
    if name == "routed mamba2":
        y = decay_reference(q, k, v, reset)[0] + read
        expected = mamba2_output(layer, y + layer.D.unsqueeze(-1) * value, z)
    else:
        expected = delta_output(layer, delta_rule_reference(q, k, v, beta, reset)[0] + read, x)
    assert relative_rms(layer(x)[0], expected) < 1e-12


def test_a_call_may_name_the_mask_of_its_length():
    layer, plain = beside_silence("mamba2", smat.schedules.kept(8))
    x, _ = tokens(2, 20)
    mask = smat.SMatMask(20, 3, 4, field_size=3, boundary=smat.schedules.kept(12))
    out, _, cache = layer(x[:, :10], use_cache=True, mask=mask)
    found = [out, layer(x[:, 10:], past_key_values=cache)[0]]
    expected = torch.cat([plain(x[:, :12])[0], plain(x[:, 12:])[0]], 1)
    assert relative_rms(torch.cat(found, 1), expected) < 1e-12


def test_masks_that_a_backbone_cannot_follow_are_refused():
    x, _ = tokens(1, 10)
    with pytest.raises(ValueError, match=r"kept\(8\).*boundary = rebuilt"):
        Mamba2(12, head_dim=6, memory=distant(ProfileMemory, 4, smat.schedules.rebuilt()))(
            x.float()
        )
    memory = distant(TransportedMemory, 4, smat.schedules.window(4))
    with pytest.raises(ValueError, match=r"kept boundary, got .*window\(step=4\)"):
        GatedDeltaNet(12, head_dim=6, memory=memory)(x.float())
    with pytest.raises(ValueError, match="no memory"):
        LogLinearMamba2(12, head_dim=6, memory=distant(ProfileMemory, 4, smat.schedules.kept(8)))


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_equals_transformers(groups):
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    scan = inspect.unwrap(module.mamba2_chunk_scan)
    torch.manual_seed(0)
    layer = Mamba2(32, head_dim=16, state_dim=8, num_groups=groups)
    x, raw_x = torch.randn(2, 150, 32), torch.randn(2, 32)
    out, _, cache = layer(x, use_cache=True)
    z, value, b, c, raw = mamba2_inputs(layer, x)
    options = {"D": layer.D, "dt_bias": layer.dt_bias, "dt_softplus": True}
    y, state = scan(value, raw, -layer.A_log.exp(), b, c, 64, return_final_states=True, **options)
    assert relative_rms(out, mamba2_output(layer, y, z)) < PEER
    assert relative_rms(state_of(cache), state.mT) < PEER

    update = inspect.unwrap(module.mamba2_selective_state_update)
    step, after = layer.step(raw_x, cache)
    both = torch.cat([x, raw_x.unsqueeze(1)], 1)
    z, value, b, c, raw = (part[:, -1] for part in mamba2_inputs(layer, both))
    wide = (*value.shape, layer.state_dim)
    rate = (-layer.A_log.exp())[:, None, None].expand(wide[1:])
    options = {
        "D": layer.D[:, None].expand(wide[1:3]),
        "dt_bias": layer.dt_bias[:, None].expand(wide[1:3]),
        "dt_softplus": True,
    }
    state = state.detach().clone()
    y = update(state, value, raw[..., None].expand(wide[:3]), rate, b, c, **options)
    assert relative_rms(step, mamba2_output(layer, y, z)) < PEER
    assert relative_rms(state_of(after), state.mT) < PEER


def test_mamba2_equals_fla():
    naive = pytest.importorskip("fla.ops.simple_gla.naive").naive_recurrent_simple_gla
    torch.manual_seed(0)
    layer = Mamba2(32, head_dim=16, state_dim=8)
    x = torch.randn(2, 100, 32)
    out, _, cache = layer(x, use_cache=True)
    expected, state = mamba2_by_tokens(
        layer, x, lambda q, k, v, g: naive(q, k, v, g, scale=1.0, output_final_state=True)
    )
    assert relative_rms(out, expected) < PEER
    assert relative_rms(state_of(cache), state) < PEER


@pytest.mark.parametrize("kind", ["chunk", "recurrent"])
def test_gated_deltanet_equals_transformers(kind):
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    peer = inspect.unwrap(getattr(module, f"torch_{kind}_gated_delta_rule"))
    torch.manual_seed(0)
    layer = GatedDeltaNet(32, num_heads=2, head_dim=16)
    x = torch.randn(2, 150, 32)
    out, _, cache = layer(x, use_cache=True)
    q, k, v, beta, log_decay = delta_inputs(layer, x)
    y, state = peer(q, k, v, g=log_decay, beta=beta, initial_state=None, output_final_state=True)
    assert relative_rms(out, delta_output(layer, y, x)) < PEER
    assert relative_rms(cache["state"], state) < PEER


def test_delta_layers_equal_fla():
    gated = pytest.importorskip("fla.ops.gated_delta_rule.naive").naive_recurrent_gated_delta_rule
    plain = pytest.importorskip("fla.ops.delta_rule.naive").delta_rule_recurrence
    torch.manual_seed(0)
    x = torch.randn(2, 100, 32)
    layer = GatedDeltaNet(32, num_heads=2, head_dim=16)
    out, _, cache = layer(x, use_cache=True)
    y, state = gated(*delta_inputs(layer, x), output_final_state=True)
    assert relative_rms(out, delta_output(layer, y, x)) < PEER
    assert relative_rms(cache["state"], state) < PEER

    layer = DeltaNet(32, num_heads=2, head_dim=16)
    out, _, cache = layer(x, use_cache=True)
    q, k, v, beta = (part.transpose(1, 2) for part in delta_inputs(layer, x)[:4])
    y, state = plain(q, k, v, beta)
    assert relative_rms(out, delta_output(layer, y.transpose(1, 2), x)) < PEER
    assert relative_rms(cache["state"], state) < PEER


def test_log_linear_mamba2_equals_fla():
    naive = pytest.importorskip("fla.ops.log_linear_attn.naive").naive_log_linear_attn
    torch.manual_seed(0)
    layer = LogLinearMamba2(32, head_dim=16, state_dim=8, num_levels=7)
    x = torch.randn(1, 64, 32)
    weights = layer.level_weights(x)
    expected, _ = mamba2_by_tokens(layer, x, lambda q, k, v, g: naive(q, k, v, g, weights))
    assert relative_rms(layer(x)[0], expected) < PEER
