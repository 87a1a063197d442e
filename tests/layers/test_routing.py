"""Learned write addresses: discrete, causal, exactly weighted, with gradients where promised."""

import itertools
import math

import pytest
import torch

from smat.geometry import Geometry
from smat.layers.mixer import reset_children
from smat.layers.routing.balance import balance_weight
from smat.layers.routing.learned import HashProjection, LearnedRouting
from smat.layers.routing.routers import CallInfo, ContentRouting, balance_loss, distant_tokens
from smat.layers.routing.selector_names import SELECTORS
from smat.masks import SMatMask, window

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")  # masks of few tokens
HIDDEN, HEADS = 6, 2
GEOMETRIES = [Geometry(1, 2), Geometry(2, 7), Geometry(3, 5), Geometry(4, 3)]


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_an_address_is_the_formula_of_the_appendix(geometry):
    torch.manual_seed(0)
    learned = LearnedRouting(HIDDEN, HEADS, geometry).double()
    projection = learned.projections[str(geometry.field_size)]
    torch.nn.init.normal_(projection.bias)
    hidden = draw(2, 9, HIDDEN)
    profile = learned(hidden)[0].profile
    for t in range(9):
        taps = [
            learned.conv.weight[:, 3 - lag] * hidden[:, t - lag] for lag in range(4) if t >= lag
        ]
        convolved = sum(taps)
        centred = convolved - convolved.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        for head in range(HEADS):
            number = torch.zeros(2, dtype=torch.long)
            for k in range(geometry.ambient_dim):
                w = projection.weight[head, k]
                z = projection.gain[head, k] * (normed @ (w / w.norm())) + projection.bias[head, k]
                cell = (geometry.field_size * (1 + torch.erf(z / math.sqrt(2))) / 2).floor()
                number = number * geometry.field_size + cell.long()
            assert torch.equal(profile[:, t, head], number)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("field_size", [2, 5, 127, 1021])
def test_extreme_inputs_stay_inside_the_field(dtype, field_size):
    projection = HashProjection(HIDDEN, HEADS, Geometry(3, field_size)).to(dtype)
    torch.nn.init.constant_(projection.gain, 50.0)
    profile, ste_weight, bin_position = projection(draw(64, HIDDEN).to(dtype))
    assert profile.min() >= 0
    assert profile.max() < field_size**2
    assert bin_position.max() < field_size
    assert torch.equal(ste_weight, torch.ones_like(ste_weight))


@pytest.mark.parametrize("geometry", GEOMETRIES[1:], ids=str)
def test_the_weight_is_exactly_one_and_its_slope_minus_one(geometry):
    projection = HashProjection(HIDDEN, HEADS, geometry).double()
    hidden = draw(40, HIDDEN).requires_grad_()
    profile, ste_weight, bin_position = projection(hidden)
    assert torch.equal(ste_weight, torch.ones_like(ste_weight))
    (found,) = torch.autograd.grad(ste_weight.sum(), bin_position, retain_graph=True)
    assert torch.equal(found, -torch.ones_like(found))
    ste_weight.sum().backward()
    assert all(p.grad.abs().max() > 0 for p in projection.parameters())
    assert not profile.dtype.is_floating_point


def test_positions_and_the_balance_loss_pass_gradcheck():
    projection = HashProjection(HIDDEN, HEADS, Geometry(3, 5)).double()
    hidden = draw(2, 7, HIDDEN, seed=3)
    names = [name for name, _ in projection.named_parameters()]

    def positions(x, *values):
        given = dict(zip(names, values, strict=True))
        # All but the floor: `forward` is differentiated with the address held fixed.
        return torch.func.functional_call(Positions(projection), given_prefix(given), (x,))

    def loss(x, *values):
        return balance_loss(positions(x, *values), 5)

    inputs = [hidden, *projection.parameters()]
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(positions, inputs)
    assert torch.autograd.gradcheck(loss, inputs)


class Positions(torch.nn.Module):
    def __init__(self, projection):
        super().__init__()
        self.projection = projection

    def forward(self, x):
        return self.projection.bin_position(x)


def given_prefix(given):
    return {f"projection.{name}": value for name, value in given.items()}


def test_the_balance_loss_is_its_formula():
    q, heads, dim = 5, 2, 3
    position = (q - 1e-9) * torch.rand(2, 11, heads, dim, dtype=torch.float64)
    counted = torch.rand(2, 11) < 0.6
    total = 0.0
    for head in range(heads):
        for k in range(dim):
            mass = [0.0] * q
            for s in position[counted][:, head, k].tolist():
                a = math.floor(s)
                mass[a] += 1 - (s - a)
                mass[min(a + 1, q - 1)] += s - a
            shares = [m / int(counted.sum()) for m in mass]
            total += sum(p * math.log(q * p) for p in shares if p > 0) / (heads * dim)
    found = balance_loss(position, q, counted)
    assert found.item() == pytest.approx(total, abs=1e-12)
    nothing = torch.zeros_like(counted)
    assert balance_loss(position, q, nothing).item() == 0
    assert balance_loss(position[..., :0], q).item() == 0


def test_the_balance_loss_spreads_addresses_that_fell_together():
    torch.manual_seed(0)
    projection = HashProjection(HIDDEN, HEADS, Geometry(3, 5))
    torch.nn.init.constant_(projection.bias, 1.5)
    hidden = torch.randn(4, 100, HIDDEN)
    losses = []
    for _ in range(100):
        loss = balance_loss(projection(hidden)[2], 5)
        grads = torch.autograd.grad(loss, list(projection.parameters()))
        assert all(grad.isfinite().all() for grad in grads)
        with torch.no_grad():
            for parameter, grad in zip(projection.parameters(), grads, strict=True):
                parameter -= 0.5 * grad
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def test_the_weight_of_the_balance_loss_is_annealed():
    assert balance_weight(250, weight=0.4, anneal_steps=1000) == pytest.approx(0.3)
    assert balance_weight(10**6, weight=0.4, anneal_steps=0) == 0.4
    with pytest.raises(ValueError, match="-1"):
        balance_weight(-1)


def test_distant_tokens_are_counted_without_padding_and_within_packed_sequences():
    mask = SMatMask(32, 3, chunk_size=4, field_size=3)
    cpu = torch.device("cpu")
    assert distant_tokens(mask, CallInfo(2, 32, cpu)).sum(1).tolist() == [16, 16]
    # no query is behind the boundary
    assert distant_tokens(mask, CallInfo(2, 16, cpu)).sum().item() == 0
    real = torch.arange(32) < torch.tensor([[27], [20], [10]])  # padding stands behind
    marks = distant_tokens(mask, CallInfo(3, 32, cpu, real))
    assert marks.sum(1).tolist() == [16, 16, 0]
    assert marks[0, :16].all()
    edges = torch.tensor([0, 16, 48])
    packed = distant_tokens(mask, CallInfo(1, 48, cpu, cu_seqlens=edges))
    assert packed[0].nonzero().flatten().tolist() == [*range(8), *range(16, 32)]
    moving = SMatMask(32, 3, chunk_size=4, field_size=3, boundary=window(4))
    assert distant_tokens(moving, CallInfo(1, 14, cpu)).sum().item() == 8


def test_padding_is_left_out_of_addresses_and_loss():
    mask = SMatMask(16, 3, chunk_size=2, field_size=3)
    routing = ContentRouting(LearnedRouting(HIDDEN, HEADS, mask.geometry).double())
    hidden, cpu = draw(1, 12, HIDDEN), torch.device("cpu")
    alone, _ = routing(hidden, mask, CallInfo(1, 12, cpu))
    expected = routing.balance_loss.item()
    junk = draw(1, 4, HIDDEN, seed=9)
    real = torch.arange(16)[None] < 12
    padded, _ = routing(torch.cat([hidden, junk], 1), mask, CallInfo(1, 16, cpu, real))
    for found, wanted in zip(padded[:2], alone[:2], strict=True):
        assert torch.equal(found[:, :8], wanted[:, :8])
    assert torch.equal(padded.query_type[:, :12], alone.query_type)
    assert routing.balance_loss.item() == pytest.approx(expected, abs=1e-12)


def test_packed_sequences_are_hashed_apart():
    routing = LearnedRouting(HIDDEN, HEADS, Geometry(3, 5)).double()
    hidden = draw(1, 12, HIDDEN)
    edges = [0, 2, 2, 7, 12]
    first = CallInfo(1, 12, hidden.device, cu_seqlens=torch.tensor(edges)).first_visible()
    packed, position = routing(hidden, first_visible=first)
    apart = [routing(hidden[:, a:b]) for a, b in itertools.pairwise(edges) if b > a]
    assert torch.equal(packed.profile, torch.cat([each.profile for each, _ in apart], 1))
    assert torch.equal(position, torch.cat([each for _, each in apart], 1))


@pytest.mark.parametrize("selector", SELECTORS)
def test_routing_is_causal_and_steps_give_what_the_whole_gives(selector):
    routing = LearnedRouting(HIDDEN, HEADS, Geometry(3, 5), selector=selector).double()
    hidden = draw(2, 12, HIDDEN)
    whole, _ = routing(hidden)
    for t in range(12):
        changed = hidden.clone()
        changed[:, t] = draw(2, HIDDEN, seed=t + 1)
        route, _ = routing(changed)
        assert torch.equal(route.profile[:, :t], whole.profile[:, :t])
        assert torch.equal(route.query_type[:, :t], whole.query_type[:, :t])
        assert torch.equal(route.read_weight[:, :t], whole.read_weight[:, :t])
    for split in (0, 1, 2, 5):
        state = routing.conv.next_state(hidden[:, :split]) if split else None
        for t in range(split, 12):
            token = hidden[:, t : t + 1]
            route, _ = routing(token, state=state)
            state = routing.conv.next_state(token, state)
            assert torch.equal(route.profile[:, 0], whole.profile[:, t])
            assert torch.equal(route.query_type[:, 0], whole.query_type[:, t])
            torch.testing.assert_close(route.read_weight[:, 0], whole.read_weight[:, t])


def test_every_field_size_has_parameters_of_its_own():
    geometries = [SMatMask(length, 3, chunk_size=16).geometry for length in (128, 256, 1024)]
    routing = LearnedRouting(HIDDEN, HEADS, geometries)
    assert list(routing.projections) == ["5", "7", "11"]
    hidden = torch.randn(1, 9, HIDDEN)
    reads, _ = routing(hidden, geometries[1])
    reads.read_weight.square().sum().backward()
    touched = [name for name, p in routing.named_parameters() if p.grad is not None]
    assert touched == ["selectors.7.scorer.weight", "selectors.7.scorer.bias"]
    with pytest.raises(ValueError, match="5, 7, 11, got field size 13"):
        routing(hidden, Geometry(3, 13))
    with pytest.raises(ValueError, match="no geometry"):
        routing(hidden)


@pytest.mark.parametrize("vc_dim", [2, 3, 4])
def test_parameters_are_those_of_the_paper(vc_dim):
    geometry = Geometry(vc_dim, 5)
    routing = LearnedRouting(64, 4, geometry)
    count = sum(p.numel() for p in routing.parameters())
    hash_count = 4 * (vc_dim - 1) * (64 + 2)
    assert count == 64 * 4 + hash_count + (64 + 1) * 4 * geometry.num_types


def test_parameters_are_drawn_after_the_meta_device():
    with torch.device("meta"):
        routing = LearnedRouting(HIDDEN, HEADS, Geometry(3, 5))
    routing.to_empty(device="cpu")
    for parameter in routing.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    reset_children(routing)
    assert all(p.isfinite().all() for p in routing.parameters())


def test_an_unknown_selector_is_refused():
    with pytest.raises(ValueError, match=r"top_types, factored.*got 'best'"):
        LearnedRouting(HIDDEN, HEADS, Geometry(3, 5), selector="best")


def test_a_direction_comes_from_what_the_point_comes_from():
    torch.manual_seed(0)
    learned = LearnedRouting(8, num_heads=2, geometry=Geometry(3, 5), selector="own_hyperplane")
    hidden = torch.randn(2, 40, 8)
    routing, _ = learned(hidden)
    (selector,) = learned.selectors.values()
    expected = selector(learned.conv(hidden), routing.profile)
    assert torch.equal(routing.query_type, expected.query_type)
    assert not torch.equal(routing.query_type, selector(hidden, routing.profile).query_type)


@pytest.mark.parametrize(("count", "taps"), [(1, [0, 0, 1]), (2, [0, 1, 1]), (3, [1, 1, 1])])
def test_the_convolution_before_a_scorer_starts_as_the_sum_of_a_request(count, taps):
    options = {"router_init": "previous_token", "selector_conv": 3, "request_tokens": count}
    learned = LearnedRouting(8, num_heads=2, geometry=Geometry(3, 5), **options)
    assert learned.selector_conv.weight.tolist() == [taps] * 8
