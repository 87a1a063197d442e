"""A memory that reads the hyperplane of a request, over a hash that stays even."""

import dataclasses
import itertools
import math

import pytest
import torch

from smat.geometry import Geometry
from smat.layers import LearnedRouting, Mamba2, MemorySettings
from smat.layers.routing import request
from smat.layers.routing.balance import hyperplane_balance
from smat.layers.routing.request import LearnedRequest
from smat.layers.routing.routers import balance_loss

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")  # masks of few tokens
HIDDEN, HEADS = 16, 2
SMALL = {"vc_dim": 3, "horizon": 64, "head_dim": 8, "state_dim": 4}


def request_routing(vc_dim, num_tokens, field_size=5, selector="request"):
    torch.manual_seed(0)
    return LearnedRouting(
        HIDDEN, HEADS, Geometry(vc_dim, field_size), selector=selector,
        router_init="previous_token", request_tokens=num_tokens,
    )  # fmt: skip


def scorer_of(routing):
    (selector,) = routing.selectors.values()
    return selector.scorer


def scored(selector):
    """Draw scores that differ from token to token, which at the start they do not."""
    torch.nn.init.normal_(selector.scorer.weight, std=0.3)
    return selector


def score_every_set(geometry, asked, points):
    """Score the sets of points (W) that hyperplanes hold: {set: (score, first hyperplane)}."""
    found = {}
    for index, holds in enumerate(geometry.incidence()[:, points].tolist()):
        if any(holds) and tuple(holds) not in found:
            score = sum(s for s, held in zip(asked, holds, strict=True) if held)
            found[tuple(holds)] = score, index
    return found


@pytest.mark.parametrize(("vc_dim", "num_tokens"), [(2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3)])
def test_up_to_d_minus_1_tokens_are_all_on_the_hyperplane_that_is_read(vc_dim, num_tokens):
    routing = request_routing(vc_dim, num_tokens)
    reads, _ = routing(torch.randn(3, 40, HIDDEN))
    incidence = routing.projections["5"].geometry.incidence()
    query_type = reads.query_type[..., 0]
    for lag in range(num_tokens):  # filed under token t - lag is the token behind it
        row = torch.arange(num_tokens, 39)
        filed = reads.profile[:, row - lag + 1]
        assert incidence[query_type[:, row], filed].all()
    assert (reads.read_weight == 1).all()


def test_d_tokens_share_a_hyperplane_only_by_chance_and_the_own_is_read_all_the_same():
    for vc_dim in (2, 3):
        routing = request_routing(vc_dim, vc_dim)
        reads, _ = routing(torch.randn(8, 200, HIDDEN))
        incidence = routing.projections["5"].geometry.incidence()
        row = torch.arange(vc_dim, 199)
        held = torch.stack(
            [
                incidence[reads.query_type[:, row, :, 0], reads.profile[:, row - lag + 1]]
                for lag in range(vc_dim)
            ]
        )
        assert held[0].all()
        assert 0.1 < held.all(0).float().mean() < 0.4  # of random points 1/q and a little more


def test_a_hash_that_is_trained_names_what_it_files_under_the_token_alone():
    routing = request_routing(3, 1).double()
    torch.nn.init.normal_(routing.conv.weight)
    routing.conv.weight.data[:, -1] = 0  # what the filed token adds itself
    reads, _ = routing(torch.randn(2, 30, HIDDEN, dtype=torch.float64))
    incidence = routing.projections["5"].geometry.incidence()
    assert incidence[reads.query_type[:, :-1, :, 0], reads.profile[:, 1:]].all()


@pytest.mark.parametrize(("vc_dim", "field_size", "width"), [(2, 7, 3), (3, 3, 4), (4, 2, 4)])
def test_a_learned_request_reads_the_best_scored_hyperplane(vc_dim, field_size, width):
    geometry = Geometry(vc_dim, field_size)
    torch.manual_seed(0)
    selector = scored(LearnedRequest(HIDDEN, HEADS, geometry, 3, width)).double()
    hidden = torch.randn(40, HIDDEN, dtype=torch.float64, requires_grad=True)
    points = torch.randint(geometry.num_profiles, (40, HEADS, width))
    reads = selector(hidden, points)
    probe = torch.randn(40, HEADS, 3, dtype=torch.float64)
    (found,) = torch.autograd.grad((reads.read_weight * probe).sum(), hidden)
    asked, expected = selector.scorer(hidden), 0.0
    for token in range(40):
        for head in range(HEADS):
            sets = score_every_set(geometry, asked[token], points[token, head])
            best = sorted(sets.values(), key=lambda each: -each[0].item())[:3]
            score, index = zip(*best, strict=True)
            assert reads.query_type[token, head, : len(best)].tolist() == list(index)
            assert reads.read_weight[token, head].tolist() == [1, 0, 0]
            share = torch.stack(score).softmax(0)
            expected = expected + (share * probe[token, head, : len(best)]).sum()
    torch.testing.assert_close(found, torch.autograd.grad(expected, hidden)[0])
    with torch.no_grad():
        alone = selector(hidden, points)
    assert torch.equal(alone.query_type, reads.query_type[..., :1])
    assert torch.equal(alone.read_weight, reads.read_weight[..., :1])


@pytest.mark.parametrize(("vc_dim", "num_tokens"), [(1, 1), (2, 1), (3, 2), (4, 3), (3, 3), (2, 3)])
def test_a_learned_request_for_some_tokens_reads_as_the_rule_for_these(vc_dim, num_tokens):
    rule = request_routing(vc_dim, num_tokens)
    learned = request_routing(vc_dim, 4, selector="learned_request")
    with torch.no_grad():  # the last tokens are asked for, the own a little more, others are not
        scorer_of(learned).weight.zero_()
        scorer_of(learned).bias.zero_()[:num_tokens] = 1.0
        scorer_of(learned).bias[0] = 1.5
    hidden, incidence = torch.randn(4, 60, HIDDEN), Geometry(vc_dim, 5).incidence()
    asked = rule.request_cells(hidden, "5", None, None, slice(None))
    by_rule = incidence[rule(hidden)[0].query_type, asked].sum(-1)
    by_score = incidence[learned(hidden)[0].query_type[..., :1], asked].sum(-1)
    holds_all = by_rule == num_tokens
    assert holds_all.all() == (num_tokens < max(vc_dim, 2))
    assert torch.equal(by_score == num_tokens, holds_all)
    assert (by_score >= by_rule).all()  # where none holds all, as many as one can


def test_at_first_all_of_the_last_tokens_are_asked_for_in_an_order_that_is_drawn():
    torch.manual_seed(0)
    selectors = [LearnedRequest(HIDDEN, HEADS, Geometry(4, 5), request_tokens=4) for _ in "abcd"]
    asked = torch.stack([each.scorer(torch.randn(5, HIDDEN)) for each in selectors])
    assert (asked == asked[:, :1]).all()  # whatever the query is
    assert ((asked - 1).abs() < 0.1).all()
    assert len({tuple(each.argsort().tolist()) for each in asked[:, 0]}) > 1


def test_requests_that_are_named_a_block_at_a_time_are_the_same(monkeypatch):
    points = torch.randint(25, (3, 7, HEADS, 3), generator=torch.Generator().manual_seed(0))
    whole = request._types_through_sets(points, 3, 5)
    monkeypatch.setattr(request, "BLOCK", 50)  # some three rows
    assert torch.equal(request._types_through_sets(points, 3, 5), whole)
    assert (whole[..., 0] == -1).all()
    line = request._types_through_sets(points * 0, 1, 5)  # of one point all are asked for
    assert line[..., -1].eq(0).all()
    assert line[..., :-1].eq(-1).all()


def test_all_heads_ask_for_the_same_tokens():
    selector = scored(LearnedRequest(HIDDEN, HEADS, Geometry(2, 101), request_tokens=3))
    hidden, points = torch.randn(50, HIDDEN), torch.randperm(101)[:6].view(1, HEADS, 3)
    reads = selector(hidden, points.expand(50, -1, -1))  # each token under a point of its own
    best = selector.scorer(hidden).argmax(-1)
    assert len(best.unique()) == 3
    assert torch.equal(reads.query_type[..., 0], points[0].T[best])


def test_noise_changes_requests_in_training_alone():
    settings = dataclasses.replace(MemorySettings.even(), request_tokens=3)
    layer = Mamba2.with_memory(HIDDEN, **SMALL, selector="learned_request", settings=settings)
    (selector,) = layer.memory.learned.selectors.values()
    assert selector.noise == settings.request_noise > 0
    x = torch.randn(2, 64, HIDDEN)
    torch.manual_seed(0)
    first = layer(x)[0]
    assert not torch.equal(layer(x)[0], first)
    torch.manual_seed(0)
    assert torch.equal(layer(x)[0], first)
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])
    points = torch.tensor([[0, 1, 2]]).expand(2000, HEADS, 3)
    lines = LearnedRequest(HIDDEN, HEADS, Geometry(2, 101), 1, 3, noise=0.5)
    with torch.no_grad():  # the first of two scores 0.5 more, the third does not count
        lines.scorer.bias.copy_(torch.tensor([0.5, 0.0, -99.0]))
        chosen = lines(torch.zeros(2000, HIDDEN), points).query_type[..., 0]
    assert torch.equal(chosen[:, 0], chosen[:, 1])
    expected = 0.5 * math.erfc(0.5)  # that noise of 0.5 sqrt(2) makes up for 0.5
    assert chosen[:, 0].double().mean().item() == pytest.approx(expected, abs=0.04)


def test_a_scorer_of_requests_learns_by_comparison_with_other_hyperplanes():
    torch.manual_seed(0)
    settings = dataclasses.replace(MemorySettings.even(), request_tokens=3)
    layer = Mamba2.with_memory(HIDDEN, **SMALL, selector="learned_request", settings=settings)
    layer(torch.randn(2, 64, HIDDEN))[0].square().sum().backward()
    scorer = scorer_of(layer.memory.learned)
    assert all(each.grad.abs().max() > 0 for each in scorer.parameters())


@pytest.mark.parametrize("selector", ["request", "learned_request"])
def test_packed_requests_do_not_look_over_the_start_of_their_sequence(selector):
    routing = request_routing(4, 3, field_size=3, selector=selector).double()
    hidden = torch.randn(1, 17, HIDDEN, dtype=torch.float64)
    edges = torch.tensor([0, 1, 3, 10, 17])
    first = torch.cat([torch.full((b - a,), a) for a, b in itertools.pairwise(edges.tolist())])
    packed, _ = routing(hidden, first_visible=first.unsqueeze(0))
    apart = [routing(hidden[:, a:b])[0] for a, b in itertools.pairwise(edges.tolist())]
    assert torch.equal(packed.query_type, torch.cat([x.query_type for x in apart], 1))


@pytest.mark.parametrize("selector", ["request", "learned_request"])
def test_rows_that_are_asked_for_read_as_all_rows_do(selector):
    routing, hidden = request_routing(4, 3, 3, selector), torch.randn(2, 20, HIDDEN)
    whole, rows = routing(hidden)[0], torch.tensor([0, 1, 7, 19])
    found, _ = routing(hidden, queries=rows)
    assert torch.equal(found.query_type, whole.query_type[:, rows])


def test_the_balance_of_hyperplanes_is_its_formula():
    geometry = Geometry(3, 3)
    generator = torch.Generator().manual_seed(0)
    position = 3 * torch.rand(2, 11, HEADS, 2, generator=generator, dtype=torch.float64) * 0.999
    weight = torch.rand(2, 11, HEADS, generator=generator, dtype=torch.float64)
    weight[0, :4] = 0
    directions = geometry.directions().tolist()
    expected = 0.0
    for head in range(HEADS):
        for direction in directions:
            on_plane = [0.0] * 3
            for place, amount in zip(
                position[:, :, head].flatten(0, 1).tolist(), weight[:, :, head].flatten().tolist(),
                strict=True,
            ):  # fmt: skip
                for corner in itertools.product((0, 1), repeat=2):
                    point, part = [], amount
                    for s, up in zip(place, corner, strict=True):
                        point.append(min(math.floor(s) + up, 2))
                        part *= s - math.floor(s) if up else 1 - (s - math.floor(s))
                    offset = sum(a * x for a, x in zip(direction, point, strict=True)) % 3
                    on_plane[offset] += part
            shares = [mass / weight[:, :, head].sum().item() for mass in on_plane]
            expected += sum(p * math.log(3 * p) for p in shares if p > 0)
    expected /= HEADS * len(directions)
    found = hyperplane_balance(position, geometry, weight)
    assert found.item() == pytest.approx(expected, abs=1e-12)
    assert hyperplane_balance(position, geometry, 0 * weight).item() == 0
    assert hyperplane_balance(position[..., :0], Geometry(1, 3), weight).item() == 0


def test_on_a_line_both_balance_losses_are_one_and_gradients_are_right():
    generator = torch.Generator().manual_seed(1)
    position = torch.rand(2, 9, HEADS, 1, generator=generator, dtype=torch.float64) * 6.9
    counted = torch.rand(2, 9, generator=generator) < 0.7
    weight = counted.double().unsqueeze(-1)
    found = hyperplane_balance(position, Geometry(2, 7), weight)
    torch.testing.assert_close(found, balance_loss(position, 7, counted), rtol=1e-12, atol=1e-12)
    plane = (0.1 + 0.8 * torch.rand(1, 7, 1, 2, generator=generator, dtype=torch.float64)) + 1
    plane.requires_grad_()
    ones = torch.ones(1, 7, 1, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: hyperplane_balance(x, Geometry(3, 5), ones), plane)


def test_an_even_hash_learns_from_its_balance_alone():
    torch.manual_seed(0)
    layer = Mamba2.with_memory(HIDDEN, **SMALL, selector="request", settings="even").double()
    x = torch.randn(2, 64, HIDDEN, dtype=torch.float64, requires_grad=True)
    out = layer(x)[0]
    learned, projection = (
        layer.memory.learned,
        next(iter(layer.memory.learned.projections.values())),
    )
    out.square().sum().backward(retain_graph=True)
    assert all(each.grad is None or not each.grad.any() for each in projection.parameters())
    assert x.grad.abs().max() > 0
    assert layer.memory.write_gate.linear.weight.grad.abs().max() > 0
    task_grad = x.grad.clone()
    layer.memory.balance_loss.backward()
    assert all(each.grad.abs().max() > 0 for each in projection.parameters())
    assert torch.equal(x.grad, task_grad)  # and it does not move what is hashed
    assert not learned.conv.weight.requires_grad


def test_what_is_written_counts_in_the_balance_and_noise_does_not():
    torch.manual_seed(0)
    layer = Mamba2.with_memory(HIDDEN, **SMALL, selector="request", settings="even")
    x = torch.randn(2, 64, HIDDEN)
    layer(x)
    all_count = layer.memory.balance_loss
    with torch.no_grad():  # only tokens along one channel are written
        layer.memory.write_gate.linear.weight.zero_()[:, 0] = 50.0
        layer.memory.write_gate.linear.bias.fill_(-50.0)
    layer(x)
    assert layer.memory.balance_loss > 1.5 * all_count  # a few tokens fill few lines


def make_with_start(start):
    torch.manual_seed(0)
    settings = dataclasses.replace(MemorySettings(), key_init=start)
    return Mamba2.with_memory(HIDDEN, **SMALL | {"state_dim": 16}, settings=settings)


def make_alone(start):
    torch.manual_seed(2)
    return Mamba2(HIDDEN, head_dim=8, state_dim=16, key_init=start)


@pytest.mark.parametrize("make", [make_with_start, make_alone])
def test_positive_keys_and_queries_begin_with_a_positive_product(make):
    x = torch.randn(4, 64, HIDDEN, generator=torch.Generator().manual_seed(2))
    for start, least, most in (("positive", 0.99, 1.0), ("random", 0.0, 0.9)):
        layer = make(start)
        _, inputs, _ = layer.in_proj(x).split(layer.widths, -1)
        k, q = layer.conv(inputs)[..., layer.inner_size :].chunk(2, -1)
        share = (q @ k.mT > 0).float().mean()
        assert least <= share <= most


def test_a_start_of_keys_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="key_init must be one of random, positive, got 'one'"):
        Mamba2(HIDDEN, head_dim=8, key_init="one")
    with pytest.raises(ValueError, match="conv_bias is False"):
        Mamba2(HIDDEN, head_dim=8, key_init="positive", conv_bias=False)


def test_what_a_request_cannot_be_is_refused_with_numbers():
    options = {"hidden_size": HIDDEN, "num_heads": HEADS, "geometry": Geometry(3, 5)}
    with pytest.raises(ValueError, match="between 1 and 8 to be scored, got 9"):
        LearnedRouting(**options, selector="learned_request", request_tokens=9)
    with pytest.raises(ValueError, match="num_reads must be 1 or more, got 0"):
        LearnedRouting(**options, selector="learned_request", num_reads=0)
    with pytest.raises(ValueError, match="request_noise must be 0 or more, got -1"):
        MemorySettings(request_noise=-1.0)


@pytest.mark.parametrize("given", [{"conv_width": 1}, {"selector_conv": 3}])
def test_a_request_needs_a_token_before_and_no_convolution_of_its_own(given):
    width, conv = given.get("conv_width", 4), given.get("selector_conv", 0)
    with pytest.raises(ValueError, match=f"conv_width of 2 or more and .*, got {width} and {conv}"):
        LearnedRouting(HIDDEN, HEADS, Geometry(3, 5), selector="request", **given)
