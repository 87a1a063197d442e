"""The oracle itself, against sums written out term by term."""

import math

import pytest
import torch

import smat
from tests.ops.smat.comparison import make_inputs, mild_gates, relative_rms

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")


def feature(x):
    """elu(x) + 1 of one number."""
    return x + 1 if x > 0 else math.exp(x)


def attend_by_terms(inputs, mask, normalize=True, routing=None):
    """Add up one product after another, in Python numbers."""
    routing = routing or {}
    q, k, v = (inputs[name].tolist() for name in ("q", "k", "v"))
    batch, seq_len, heads, width = inputs["q"].shape[0:3] + inputs["v"].shape[3:]
    group = heads // inputs["k"].shape[2]
    incidence = mask.geometry.incidence().tolist()
    position = torch.arange(seq_len)
    out = torch.zeros(batch, seq_len, heads, width, dtype=torch.float64)
    boundaries = [mask.schedule.boundary_at(t) for t in range(seq_len)]
    default = {"profile": mask.profile(position), "query_type": mask.query_type(position)}

    def at(name, b, t, h, otherwise):
        given = inputs.get(name, routing.get(name))
        if given is None:
            return otherwise
        return given[b, t, h // (heads // given.shape[2])].item()

    for b, i, h in torch.cartesian_prod(*map(torch.arange, (batch, seq_len, heads))).tolist():
        total, sums, decay = 0.0, [0.0] * width, 1.0
        for j in range(i, -1, -1):
            weight = decay * at("key_gate", b, j, h, 1.0)
            decay *= math.exp(at("log_decay", b, j, h, 0.0))
            if j < boundaries[i]:
                kind = at("query_type", b, i, h, default["query_type"][i].item())
                weight *= incidence[kind][at("profile", b, j, h, default["profile"][j].item())]
                weight *= at("write_weight", b, j, h, 1.0)
            pairs = zip(q[b][i][h], k[b][j][h // group], strict=True)
            weight *= sum(feature(x) * feature(y) for x, y in pairs)
            total += weight
            sums = [s + weight * x for s, x in zip(sums, v[b][j][h // group], strict=True)]
        out[b, i, h] = torch.tensor(sums, dtype=torch.float64) / (total if normalize else 1.0)
    return out


@pytest.mark.parametrize(
    "boundary",
    [
        None,
        smat.schedules.none(),
        smat.schedules.kept(5),
        smat.schedules.doubling(),
        smat.schedules.window(3),
    ],
    ids=str,
)
@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
def test_equals_the_sum_over_keys(boundary, vc_dim):
    mask = smat.SMatMask(16, vc_dim, 2, field_size=3, boundary=boundary)
    inputs = make_inputs(16, batch=1, group=2, key_dim=2, value_dim=2)
    expected = attend_by_terms(inputs, mask)
    assert relative_rms(smat.reference_attention(mask=mask, **inputs), expected) <= 1e-13


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("gate_heads", [2, 4])
def test_equals_the_gated_sum_over_keys(normalize, gate_heads):
    mask = smat.SMatMask(16, 3, 2, field_size=3, boundary=smat.schedules.window(4))
    inputs = make_inputs(16, group=2, key_dim=2, value_dim=2)
    shape = (2, 16, gate_heads)
    generator = torch.Generator().manual_seed(0)
    inputs["log_decay"] = mild_gates(shape, strength=2.0)
    inputs["key_gate"] = torch.rand(shape, generator=generator, dtype=torch.float64)
    inputs["write_weight"] = torch.rand(shape, generator=generator, dtype=torch.float64)
    routing = {
        "profile": torch.randint(9, shape, generator=generator),
        "query_type": torch.randint(12, (2, 16, 4), generator=generator),
    }
    expected = attend_by_terms(inputs, mask, normalize, routing)
    found = smat.reference_attention(mask=mask, normalize=normalize, **inputs, **routing)
    assert relative_rms(found, expected) <= 1e-13


def test_padding_and_packing_are_sequences_alone():
    mask, inputs = smat.SMatMask(30, 3, 2), make_inputs(30)
    real = torch.ones(2, 30)
    real[0, :11] = real[1, 20:] = 0
    out = smat.reference_attention(mask=mask, attention_mask=real, **inputs)
    alone = {name: x[:1, 11:] for name, x in inputs.items()}
    assert relative_rms(out[:1, 11:], smat.reference_attention(mask=mask, **alone)) <= 1e-13
    assert not out[0, :11].any()
    assert not out[1, 20:].any()
    packed = {name: x[:1] for name, x in inputs.items()}
    edges = torch.tensor([0, 9, 9, 30])
    out = smat.reference_attention(mask=mask, cu_seqlens=edges, **packed)
    for start, stop in ((0, 9), (9, 30)):
        alone = {name: x[:, start:stop] for name, x in packed.items()}
        expected = smat.reference_attention(mask=mask.for_length(stop - start), **alone)
        assert relative_rms(out[:, start:stop], expected) <= 1e-13


def test_a_row_that_sees_nothing_gives_zero_with_finite_gradients():
    inputs = {name: -torch.ones(1, 4, 1, 2, requires_grad=True) for name in ("q", "k", "v")}
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    out = smat.reference_attention(mask=smat.SMatMask(4, 2, 2), feature_map="relu", **leaves)
    assert not out.any()
    for grad in torch.autograd.grad(out.sum(), list(leaves.values())):
        assert grad.isfinite().all()


def test_an_unknown_feature_map_is_named():
    x = torch.ones(1, 4, 1, 2)
    with pytest.raises(ValueError, match=r"elu, relu, identity.*'favor'"):
        smat.reference_attention(x, x, x, smat.SMatMask(4, 1), feature_map="favor")
