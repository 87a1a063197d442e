"""Lemmas behind the theorem: causal triangles have VC dimension 1, hyperplanes of F_q^D have D."""

import itertools

import pytest
import torch

from smat.geometry import Geometry
from smat.masks import count_traces_of_sets, shatters, vc_dimension

SMALL_SPACES = [(2, 2), (2, 7), (2, 13), (3, 2), (3, 3), (3, 5), (3, 7), (4, 2), (4, 3), (5, 2)]


@pytest.mark.parametrize("order", [1, 2, 3, 17, 100])
def test_a_causal_triangle_has_vc_dimension_one(order):
    assert vc_dimension(torch.ones(order, order).tril()) == (1 if order >= 2 else 0)


@pytest.mark.parametrize(("vc_dim", "field_size"), SMALL_SPACES)
def test_hyperplanes_have_the_vc_dimension_of_their_space(vc_dim, field_size):
    geometry = Geometry(vc_dim, field_size)
    assert vc_dimension(geometry.incidence()) == geometry.ambient_dim


def witness_type(geometry, subset):
    """Number H_R: coordinates outside R add up to 0; for the full R, all of them to 1."""
    inside = [subset >> axis & 1 for axis in range(geometry.ambient_dim)]
    offset = int(all(inside))
    normal = [1] * len(inside) if offset else [1 - bit for bit in inside]
    direction = geometry.directions().tolist().index(normal)
    return int(geometry.type_index(torch.tensor(direction), torch.tensor(offset)))


@pytest.mark.parametrize(("vc_dim", "field_size"), [*SMALL_SPACES, (4, 5), (4, 11), (6, 3)])
def test_witness_hyperplanes_shatter_the_standard_basis(vc_dim, field_size):
    geometry = Geometry(vc_dim, field_size)
    incidence, basis = geometry.incidence(), geometry.basis_profiles()
    assert shatters(incidence, basis)
    witnesses = [witness_type(geometry, subset) for subset in range(2**geometry.ambient_dim)]
    traces = incidence[witnesses][:, basis]
    for subset, axis in itertools.product(range(2**geometry.ambient_dim), range(vc_dim - 1)):
        assert bool(traces[subset, axis]) == bool(subset >> axis & 1)


@pytest.mark.parametrize(("vc_dim", "field_size"), [(3, 5), (4, 5)])
def test_larger_spaces_shatter_no_set_beyond_their_dimension(vc_dim, field_size):
    geometry = Geometry(vc_dim, field_size)
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(20_000, geometry.num_profiles, generator=generator)
    sets = order.topk(vc_dim, dim=1).indices
    incidence = geometry.incidence()
    assert count_traces_of_sets(incidence, sets).max() < 2**vc_dim
    assert count_traces_of_sets(incidence, sets[:, 1:]).max() == 2 ** (vc_dim - 1)
