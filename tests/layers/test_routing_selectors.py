"""Selectors: which types are read, with what weights, and who receives gradients."""

import pytest
import torch

from smat.geometry import Geometry
from smat.layers.routing.selectors import (
    FactoredTopTypes,
    OwnCell,
    OwnHyperplane,
    TopTypes,
    point_mask,
)
from smat.masks import SMatMask, window

HIDDEN, HEADS = 6, 2
GEOMETRIES = [Geometry(1, 2), Geometry(2, 7), Geometry(3, 2), Geometry(3, 5), Geometry(4, 3)]


def draw(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def score_types(selector, hidden):
    """Score every type, which the factored selector avoids: (..., H, B)."""
    scores = selector.score(hidden)
    if isinstance(selector, TopTypes):
        return scores
    direction, offset = scores.split([selector.num_directions, selector.num_offsets], -1)
    return (direction.unsqueeze(-1) + offset.unsqueeze(-2)).flatten(-2)


@pytest.mark.parametrize("kind", [TopTypes, FactoredTopTypes])
@pytest.mark.parametrize("num_reads", [1, 2, 4, 9])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_the_best_of_all_types_are_read(kind, num_reads, geometry):
    torch.manual_seed(0)
    selector = kind(HIDDEN, HEADS, geometry, num_reads).double()
    hidden = draw(2, 30, HIDDEN)
    scores = score_types(selector, hidden)
    assert scores.shape == (2, 30, HEADS, geometry.num_types)
    best, types = scores.topk(min(num_reads, geometry.num_types), dim=-1)
    reads = selector(hidden)
    assert torch.equal(reads.query_type, types)
    torch.testing.assert_close(reads.read_weight, best.softmax(-1), rtol=0, atol=1e-14)


def test_factored_scores_number_types_as_the_geometry_does():
    geometry = Geometry(3, 5)
    selector = FactoredTopTypes(HIDDEN, HEADS, geometry).double()
    hidden = draw(7, HIDDEN)
    direction_score, offset_score = selector.score(hidden).split([6, 5], -1)
    reads = selector(hidden)
    direction, offset = reads.query_type // 5, reads.query_type % 5
    sums = direction_score.gather(-1, direction) + offset_score.gather(-1, offset)
    torch.testing.assert_close(sums.softmax(-1), reads.read_weight)


@pytest.mark.parametrize("kind", [TopTypes, FactoredTopTypes])
def test_a_single_read_is_the_best_with_weight_one_and_learns(kind):
    geometry = Geometry(3, 5)
    one, several = (kind(HIDDEN, HEADS, geometry, num_reads).double() for num_reads in (1, 4))
    one.load_state_dict(several.state_dict())
    hidden = draw(7, HIDDEN)
    reads = one(hidden)
    assert torch.equal(reads.query_type, several(hidden).query_type[..., :1])
    assert torch.equal(reads.read_weight, torch.ones(7, HEADS, 1, dtype=torch.float64))
    # A larger read of every token: its score rises, those of the others fall.
    reads.read_weight.sum().backward()
    bias_grad = one.scorer.bias.grad.view(HEADS, -1)
    parts = bias_grad.split([6, 5], -1) if kind is FactoredTopTypes else [bias_grad]
    for part in parts:
        torch.testing.assert_close(part.sum(-1), torch.zeros(HEADS, dtype=torch.float64))
    assert (bias_grad != 0).all()
    alone = kind(HIDDEN, HEADS, geometry, 1).double()
    read = alone(hidden[:1])
    read.read_weight.sum().backward()
    rising = alone.scorer.bias.grad.view(HEADS, -1) > 0
    assert rising.sum() == HEADS * len(parts)


@pytest.mark.parametrize("kind", [TopTypes, FactoredTopTypes])
def test_gradients_pass_through_chosen_scores_only(kind):
    geometry = Geometry(3, 5)
    selector = kind(HIDDEN, HEADS, geometry).double()
    hidden = draw(1, HIDDEN)
    reads = selector(hidden)
    (reads.read_weight * draw(*reads.read_weight.shape, seed=5)).sum().backward()
    touched = selector.scorer.bias.grad.view(HEADS, -1) != 0
    for head in range(HEADS):
        chosen = reads.query_type[0, head]
        expected = torch.zeros(touched.shape[1], dtype=torch.bool)
        if kind is TopTypes:
            expected[chosen] = True
            assert torch.equal(touched[head], expected)
        else:
            direction, offset = chosen // 5, chosen % 5
            expected[direction] = True
            expected[geometry.num_directions + offset] = True
            assert not (touched[head] & ~expected).any()
            assert touched[head].any()


@pytest.mark.parametrize("kind", [TopTypes, FactoredTopTypes])
def test_weights_pass_gradcheck(kind):
    selector = kind(HIDDEN, HEADS, Geometry(3, 3), 3).double()
    names = [name for name, _ in selector.named_parameters()]

    def weights(x, *values):
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(selector, given, (x,)).read_weight

    inputs = [draw(3, HIDDEN), *selector.parameters()]
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(weights, inputs)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_the_own_hyperplane_holds_the_own_point(geometry):
    selector = OwnHyperplane(HIDDEN, HEADS, geometry).double()
    profile = torch.randint(geometry.num_profiles, (2, 20, HEADS))
    reads = selector(draw(2, 20, HIDDEN), profile)
    assert reads.query_type.shape == (2, 20, HEADS, 1)
    assert geometry.incidence()[reads.query_type[..., 0], profile].all()
    assert torch.equal(reads.read_weight, torch.ones_like(reads.read_weight))


def test_the_direction_head_has_a_straight_through_gradient():
    selector = OwnHyperplane(HIDDEN, HEADS, Geometry(3, 5)).double()
    hidden = draw(1, HIDDEN)
    reads = selector(hidden, torch.zeros(1, HEADS, dtype=torch.long))
    reads.read_weight.sum().backward()
    scores = selector.scorer(hidden).view(HEADS, -1).detach().requires_grad_()
    scores.softmax(-1).max(-1).values.sum().backward()
    torch.testing.assert_close(selector.scorer.bias.grad.view(HEADS, -1), scores.grad)
    assert scores.grad.abs().min() > 0


@pytest.mark.parametrize("kind", [TopTypes, FactoredTopTypes])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e38])
def test_selected_types_exist_whatever_the_scores_are(kind, value):
    selector = kind(HIDDEN, HEADS, Geometry(3, 3), 4)
    for scores in (selector.scorer.weight.data, selector.scorer.bias.data):
        scores.fill_(value)
        reads = selector(torch.ones(5, HIDDEN))
        assert reads.query_type.min() >= 0
        assert reads.query_type.max() < 12


@pytest.mark.parametrize("boundary", [None, window(16)])
def test_the_point_mask_shows_a_cell_and_nothing_else(boundary):
    mask = SMatMask(128, 3, chunk_size=16, field_size=3, boundary=boundary)
    points = point_mask(mask)
    assert points.boundary == mask.boundary
    profile = torch.randint(mask.geometry.num_profiles, (1, 128, 1))
    reads = OwnCell()(torch.randn(1, 128, HIDDEN), profile)
    dense = points.dense(profile=profile, query_type=reads.query_type[..., 0])[0, 0]
    distant = torch.arange(128) < points.boundaries()[:, None]
    same = profile[0, :, 0] == profile[0]  # (128, 1) against (128,)
    assert torch.equal(dense[distant], same.expand(128, 128)[distant])


def test_a_read_too_few_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        TopTypes(HIDDEN, HEADS, Geometry(3, 5), num_reads=0)
