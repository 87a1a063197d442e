"""Points, directions, types and witnesses, against lists made by counting."""

import itertools

import pytest
import torch

from smat import Geometry

SMALL = [
    (2, 1),
    (3, 1),
    (2, 2),
    (5, 2),
    (2, 3),
    (3, 3),
    (5, 3),
    (7, 3),
    (2, 4),
    (3, 4),
    (2, 5),
    (3, 5),
]


def all_points(field_size, ambient_dim):
    return list(itertools.product(range(field_size), repeat=ambient_dim))


def all_directions(field_size, ambient_dim):
    """List directions as agreed: leading 1 first in the first coordinate, then in the second."""
    found = []
    for num_zeros in range(ambient_dim):
        for tail in all_points(field_size, ambient_dim - num_zeros - 1):
            found.append((0,) * num_zeros + (1,) + tail)
    return found


@pytest.mark.parametrize(("field_size", "vc_dim"), SMALL)
def test_order_of_points_directions_and_types(field_size, vc_dim):
    geometry = Geometry(vc_dim, field_size)
    points = all_points(field_size, vc_dim - 1)
    directions = all_directions(field_size, vc_dim - 1)
    assert geometry.points().tolist() == [list(point) for point in points]
    assert geometry.directions().tolist() == [list(direction) for direction in directions]
    assert geometry.points().dtype == geometry.directions().dtype == torch.long
    assert geometry.num_profiles == len(points)
    assert geometry.num_directions == len(directions)
    assert geometry.num_types == max(1, len(directions) * field_size)
    expected = [
        [sum(a * x for a, x in zip(direction, point, strict=True)) % field_size == offset
         for point in points]
        for direction in directions
        for offset in range(field_size)
    ] or [[True]]  # fmt: skip
    assert geometry.incidence().tolist() == expected


@pytest.mark.parametrize(("field_size", "vc_dim"), SMALL)
def test_incidence_is_biregular(field_size, vc_dim):
    geometry = Geometry(vc_dim, field_size)
    incidence = geometry.incidence()
    assert incidence.shape == (geometry.num_types, geometry.num_profiles)
    on_each_plane = field_size ** (vc_dim - 2) if vc_dim > 1 else 1
    assert (incidence.sum(1) == on_each_plane).all()
    assert (incidence.sum(0) == max(1, geometry.num_directions)).all()


@pytest.mark.parametrize(("field_size", "vc_dim"), SMALL)
def test_parallel_hyperplanes_part_the_space(field_size, vc_dim):
    if vc_dim == 1:
        pytest.skip("one point has no directions")
    incidence = Geometry(vc_dim, field_size).incidence()
    by_direction = incidence.view(-1, field_size, incidence.shape[1])
    assert (by_direction.sum(1) == 1).all()


@pytest.mark.parametrize(("field_size", "vc_dim"), SMALL)
def test_basis_profiles_are_the_unit_vectors(field_size, vc_dim):
    geometry = Geometry(vc_dim, field_size)
    basis = geometry.points()[geometry.basis_profiles()]
    assert basis.tolist() == torch.eye(vc_dim - 1).long().tolist()


@pytest.mark.parametrize(("field_size", "vc_dim"), SMALL)
def test_numbers_come_apart_and_together(field_size, vc_dim):
    geometry = Geometry(vc_dim, field_size)
    types = torch.arange(geometry.num_types)
    direction, offset = types // field_size, types % field_size
    assert torch.equal(geometry.type_index(direction, offset), types)
    profiles = torch.arange(geometry.num_profiles)
    if vc_dim == 1:
        assert geometry.offset_of(torch.tensor([0]), torch.tensor([0])).tolist() == [0]
        return
    own = geometry.offset_of(direction[:, None], profiles[None])
    assert torch.equal(own == offset[:, None], geometry.incidence())


def test_tables_are_the_callers_own():
    geometry = Geometry(3, 3)
    for table in (geometry.points, geometry.directions, geometry.incidence):
        table().zero_()
        assert table().any()


def test_large_tables_are_built_without_loops_over_points():
    geometry = Geometry(4, 23)
    assert geometry.points().shape == (12167, 3)
    assert geometry.directions().shape == (553, 3)
    table = torch.ones(geometry.num_profiles, 1, dtype=torch.float64)
    assert (geometry.tabulate(table) == 23**2).all()
    assert (geometry.backproject(torch.ones(geometry.num_types, 1)) == 553).all()
