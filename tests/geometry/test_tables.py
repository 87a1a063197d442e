"""Stacks of tables in orders of their own, summed whole or in slabs, against dense incidence."""

from unittest import mock

import pytest
import torch

from smat import Geometry
from smat.geometry import radon
from tests.ops.smat.comparison import poisoned_memory

GEOMETRIES = [(3, 1), (5, 2), (5, 3), (3, 4), (2, 5)]
CUTS = {
    "at once": {"STACK_ELEMENTS": 1 << 22},
    "table by table": {"STACK_ELEMENTS": 1},
    "in columns": {"WHOLE_ELEMENTS": 0, "SLAB_COLUMNS": (16, 16)},
}


def draw_orders(num_tables, size, seed):
    """Draw an order for each table: where every row stands, and which row stands where."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.stack([torch.randperm(size, generator=generator) for _ in range(num_tables)])
    return group.argsort(1), group


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(("field_size", "vc_dim"), GEOMETRIES)
def test_tables_may_stand_in_any_order(field_size, vc_dim, cut):
    geometry = Geometry(vc_dim, field_size)
    incidence = geometry.incidence().double()
    shape = (field_size, geometry.ambient_dim)
    for matrix, transform in (
        (incidence, radon.tabulate_tables),
        (incidence.mT, radon.backproject_tables),
    ):
        num_answers, num_rows = matrix.shape
        table = torch.randn(3, num_rows, 21, dtype=torch.float64)
        place, standing = draw_orders(3, num_rows, seed=0)
        _, order = draw_orders(3, num_answers, seed=1)
        stored = table.gather(1, standing.unsqueeze(-1).expand_as(table))
        in_order = matrix @ table
        expected = in_order.gather(1, order.unsqueeze(-1).expand_as(in_order))
        with mock.patch.multiple(radon, **CUTS[cut]), poisoned_memory():
            found = transform(stored, *shape, place=place, order=order)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            only_from = transform(stored, *shape, place=place)
            torch.testing.assert_close(only_from, in_order, rtol=1e-12, atol=1e-12)
            out = torch.empty_like(expected)
            only_to = transform(table, *shape, order=order, out=out)
            assert only_to.data_ptr() == out.data_ptr()
            torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_a_stack_that_is_too_large_is_cut():
    table = torch.zeros(3, 4, 5)
    assert radon._cut(table) >= (3, 5)
    with mock.patch.object(radon, "STACK_ELEMENTS", 2 * 20):
        assert radon._cut(table) == (2, 5)
    with mock.patch.object(radon, "WHOLE_ELEMENTS", 19):
        assert radon._cut(table.repeat(1, 1, 2000)) == (1, 1024)


@pytest.mark.parametrize("shape", [(0, 9, 2), (2, 9, 0)])
def test_empty_stacks_give_empty_stacks(shape):
    num_tables, _, num_columns = shape
    assert radon.tabulate_tables(torch.zeros(shape), 3, 2).shape == (num_tables, 12, num_columns)
