"""SMat-Attention as a layer against the dense oracle, and its routings against their rules."""

import pytest
import torch
import torch.nn.functional as F

import smat
from smat.layers import CallInfo, HashedRouting, SMatAttention
from smat.masks import TokenHash
from tests.layers.mixers import HIDDEN, HORIZON, VOCAB, make, relative_rms, smat_layer, tokens

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")


def project(layer, x):
    heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    parts = layer.qkv_proj(x).split(layer.widths, -1)
    return [part.unflatten(-1, (n, -1)) for part, n in zip(parts, heads, strict=True)]


@pytest.mark.parametrize("name", ["smat", "smat window", "linear attention", "smat favor"])
def test_equals_the_dense_oracle(name):
    layer = make(name)
    x, _ = tokens(2, HORIZON)
    log_decay = None
    if layer.a_proj is not None:
        log_decay = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
    y = smat.reference_attention(
        *project(layer, x), layer.recipe, feature_map=layer.feature_map, log_decay=log_decay
    )
    if layer.g_proj is not None:
        y = y * F.silu(layer.g_proj(x)).view_as(y)
    if layer.norm is not None:
        y = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
    assert relative_rms(layer(x)[0], layer.o_proj(y.flatten(-2))) < 1e-12


def test_hashed_routing_equals_the_dense_oracle_with_its_rule():
    layer = smat_layer(routing=HashedRouting(VOCAB, 2, write_lag=1)).double()
    x, ids = tokens(2, HORIZON)
    geometry = layer.recipe.geometry
    direction = torch.randint(geometry.num_directions, (2, HORIZON, 2))
    cell = TokenHash(VOCAB, 2, geometry).profile(ids)
    before = torch.cat([cell[:, :1], cell[:, :-1]], 1)
    y = smat.reference_attention(
        *project(layer, x), layer.recipe, profile=before,
        query_type=smat.masks.type_through_cell(geometry, direction, cell),
    )  # fmt: skip
    out = layer(x, token_ids=ids, query_direction=direction)[0]
    assert relative_rms(out, layer.o_proj(y.flatten(-2))) < 1e-12


def test_a_query_sees_the_cells_of_all_its_keys_where_one_hyperplane_holds_them():
    mask = smat.SMatMask(64, vc_dim=4, chunk_size=8, field_size=3)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5]])
    routing = HashedRouting(VOCAB, num_heads=3, num_keys=3)
    call = CallInfo(1, 6, ids.device, extras={"token_ids": ids})
    assignment, _ = routing(torch.empty(0), mask, call)
    incidence = mask.geometry.incidence()
    for t in range(2, 6):
        for head in range(3):
            cells = assignment.profile[0, t - 2 : t + 1, head]
            assert incidence[assignment.query_type[0, t, head], cells].all()


def test_a_bucketed_query_sees_its_own_cell_alone():
    layer = make("smat bucketed")
    x, ids = tokens(1, HORIZON)
    cell = TokenHash(VOCAB, 2, layer.recipe.geometry).profile(ids)
    n = layer.recipe.num_distant
    visible = torch.ones(HORIZON, HORIZON, dtype=torch.bool).tril().expand(2, -1, -1).clone()
    same = cell[0].T.unsqueeze(2) == cell[0].T.unsqueeze(1)
    visible[:, n:, :n] = same[:, n:, :n]
    q, k, v = project(layer, x)
    phi, psi = F.elu(q) + 1, F.elu(k) + 1
    weights = torch.einsum("bihk,bjhk->bhij", phi, psi) * visible
    y = torch.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdim=True), v)
    assert relative_rms(layer(x, token_ids=ids)[0], layer.o_proj(y.flatten(-2))) < 1e-12


@pytest.mark.parametrize("name", ["smat content", "smat content hyperplane"])
def test_learned_routing_equals_its_dense_form_with_every_gradient(name):
    layer = make(name)
    x, _ = tokens(2, HORIZON)
    mask, n = layer.recipe, layer.recipe.num_distant
    q, k, v = project(layer, x)
    phi, psi = F.elu(q) + 1, F.elu(k) + 1
    reads, _ = layer.routing.learned(x, mask.geometry)
    seen = torch.ones(HORIZON, HORIZON, dtype=torch.float64).tril().repeat(2, 2, 1, 1)
    seen[:, :, n:, :n] = 0
    for query_type, weight in zip(
        reads.query_type.unbind(-1), reads.read_weight.unbind(-1), strict=True
    ):
        far = mask.dense(profile=reads.profile, query_type=query_type).double()
        far = (
            far
            * weight.transpose(1, 2).unsqueeze(-1)
            * reads.write_weight.transpose(1, 2).unsqueeze(2)
        )
        seen = seen + F.pad(far[:, :, n:, :n], (0, HORIZON - n, n, 0))
    if layer.a_proj is not None:
        log_decay = -layer.A_log.exp() * F.softplus(layer.a_proj(x) + layer.dt_bias)
        running = log_decay.cumsum(1).transpose(1, 2)
        seen = seen * (running.unsqueeze(-1) - running.unsqueeze(-2)).clamp(max=0).exp()
    weights = torch.einsum("bihk,bjhk->bhij", phi, psi) * seen
    y = torch.einsum("bhij,bjhv->bihv", weights / weights.sum(-1, keepdim=True), v)
    expected, found = layer.o_proj(y.flatten(-2)), layer(x)[0]
    assert relative_rms(found, expected) < 1e-12
    parameters = dict(layer.named_parameters())
    probe = torch.randn_like(found)
    grads = [
        torch.autograd.grad((out * probe).sum(), parameters.values(), allow_unused=True)
        for out in (found, expected)
    ]
    for key, one, other in zip(parameters, *grads, strict=True):
        assert (one is None) == (other is None), key
        assert one is None or (one - other).abs().max() < 1e-10, key
    assert layer.routing.balance_loss >= 0


def test_a_horizon_makes_short_inputs_leading_blocks():
    layer = make("smat gated")
    x, _ = tokens(1, HORIZON)
    whole = layer(x)[0]
    for length in (1, 5, 11, 17):
        assert relative_rms(layer(x[:, :length])[0], whole[:, :length]) < 1e-10


def test_decoding_runs_past_the_horizon():
    layer = make("smat")
    x, _ = tokens(1, HORIZON + 9)
    whole = layer(x)[0]
    cache, outputs = None, []
    for token in x.unbind(1):
        out, cache = layer.step(token, cache, inplace=True)
        outputs.append(out)
    assert relative_rms(torch.stack(outputs, 1), whole) < 1e-10


def test_without_a_horizon_every_length_has_its_own_mask():
    torch.manual_seed(0)
    layer = SMatAttention(HIDDEN, num_heads=2, vc_dim=2, chunk_size=4, conv_size=3).double()
    x, _ = tokens(1, 40)
    fixed = {}
    for length in (16, 24):
        fixed[length] = SMatAttention(
            HIDDEN, num_heads=2, vc_dim=2, chunk_size=4, conv_size=3, horizon=length
        ).double()
        fixed[length].load_state_dict(layer.state_dict())
    packed = layer(x, cu_seqlens=torch.tensor([0, 16, 16, 40]))[0]
    for start, length in ((0, 16), (16, 24)):
        part = x[:, start : start + length]
        expected = fixed[length](part)[0]
        assert relative_rms(layer(part)[0], expected) < 1e-12
        assert relative_rms(packed[:, start : start + length], expected) < 1e-12
    with pytest.raises(ValueError, match="horizon=40"):
        layer(x, use_cache=True)


def test_features_expand_the_state():
    mask = smat.SMatMask(HORIZON, 3, 4, field_size=3)
    matched = 6 * (mask.geometry.num_types + 1)
    layer = smat_layer(vc_dim=1, field_size=None, feature_dim=matched)
    linear = layer(torch.randn(1, HORIZON, HIDDEN), use_cache=True)[2]["state"]
    full = smat_layer()(torch.randn(1, HORIZON, HIDDEN), use_cache=True)[2]["state"]
    assert linear.num_bytes == full.num_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundary": smat.schedules.window(4), "horizon": None, "field_size": None}, "window"),
        ({"field_size": 4}, "4"),
        ({"num_heads": 2, "num_kv_heads": 3}, "2 query heads"),
    ],
)
def test_bad_settings_are_refused_with_their_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        smat_layer(**options)


def test_hashed_routing_says_what_it_needs():
    with pytest.raises(ValueError, match=r"token_ids of shape \(1, 5\), got None"):
        make("smat hashed")(tokens(1, 5)[0])
    with pytest.raises(ValueError, match="-1 and 1"):
        HashedRouting(VOCAB, 2, write_lag=-1)


def test_distant_keys_decay_only_if_the_scope_says_so():
    x = torch.randn(1, 22, 12, generator=torch.Generator().manual_seed(3))
    layers = {}
    for scope in ("all", "recurrent"):
        torch.manual_seed(0)
        layers[scope] = smat.SMatAttention(
            12, num_heads=2, vc_dim=2, horizon=22, chunk_size=4, decay_gate=True, decay_scope=scope
        )
        with torch.no_grad():
            layers[scope].dt_bias.fill_(2.0)  # forgets within a token
    outs = {scope: layer(x)[0] for scope, layer in layers.items()}
    torch.testing.assert_close(outs["all"][:, :8], outs["recurrent"][:, :8])
    moved = x.clone()
    moved[:, 0] += 1.0  # what the last query sees of it decays over 8 tokens or more
    change = {scope: (layer(moved)[0] - outs[scope])[:, 8:] for scope, layer in layers.items()}
    assert change["all"].abs().max() < 1e-6
    assert change["recurrent"].abs().max() > 1e-3
    with pytest.raises(ValueError, match="decay_scope must be one of all, recurrent, got 'none'"):
        smat.SMatAttention(12, num_heads=2, decay_scope="none")


def test_a_read_gate_weighs_the_distant_past_alone():
    torch.manual_seed(0)
    options = {"num_heads": 2, "vc_dim": 2, "horizon": 32, "chunk_size": 8}
    routing = HashedRouting(7, 2, write_lag=1)
    plain, gated = (
        SMatAttention(12, routing=routing, read_gate=gate, **options) for gate in (False, True)
    )
    gated.load_state_dict(plain.state_dict(), strict=False)
    x, ids = torch.randn(1, 32, 12, requires_grad=True), torch.randint(7, (1, 32))
    assert torch.allclose(gated.read_gate(torch.zeros(1, 12)), torch.tensor(0.1), atol=1e-3)
    torch.nn.init.zeros_(gated.read_gate.linear.weight)
    torch.nn.init.constant_(gated.read_gate.linear.bias, 40.0)
    torch.testing.assert_close(gated(x, token_ids=ids)[0], plain(x, token_ids=ids)[0])
    torch.nn.init.constant_(gated.read_gate.linear.bias, -200.0)
    (seen,) = torch.autograd.grad(gated(x, token_ids=ids)[0][:, 16:].sum(), x)
    assert (seen[:, :16] == 0).all()
    assert (seen[:, 16:] != 0).all()


def test_positions_choose_no_types_to_weigh():
    with pytest.raises(ValueError, match="read_gate=True weighs types that a routing chooses"):
        SMatAttention(12, num_heads=2, horizon=32, read_gate=True)
