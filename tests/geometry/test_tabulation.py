"""Tabulation and its adjoint: every method is the product with the incidence matrix."""

import itertools
from unittest import mock

import pytest
import torch

from smat import Geometry
from smat.geometry import radon
from tests.ops.smat.comparison import poisoned_memory, relative_rms

SIZES = [
    (field_size, vc_dim)
    for field_size, vc_dim in itertools.product((2, 3, 5, 7, 11, 13), range(1, 6))
    if field_size ** (vc_dim - 1) <= 5000
]
SMALL = [(2, 1), (3, 2), (2, 3), (3, 3), (2, 4), (3, 4), (2, 5)]


def normal(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def tables(geometry, *batch, width=3, dtype=torch.float64):
    """Draw a profile table and a type table."""
    profile_table = normal(*batch, geometry.num_profiles, width, dtype=dtype)
    return profile_table, normal(*batch, geometry.num_types, width, seed=1, dtype=dtype)


@pytest.mark.parametrize("method", radon.METHODS)
@pytest.mark.parametrize(("field_size", "vc_dim"), SIZES)
def test_equals_the_product_with_the_incidence_matrix(field_size, vc_dim, method):
    geometry = Geometry(vc_dim, field_size)
    profile_table, type_table = tables(geometry)
    incidence = geometry.incidence().double()
    with poisoned_memory():
        tabulated = geometry.tabulate(profile_table, method)
        backprojected = geometry.backproject(type_table, method)
    assert relative_rms(tabulated, incidence @ profile_table) <= 1e-12
    assert relative_rms(backprojected, incidence.mT @ type_table) <= 1e-12


@pytest.mark.parametrize(("field_size", "vc_dim"), SIZES)
def test_adjoint_identity(field_size, vc_dim):
    geometry = Geometry(vc_dim, field_size)
    profile_table, type_table = tables(geometry)
    left = (geometry.tabulate(profile_table) * type_table).sum()
    right = (profile_table * geometry.backproject(type_table)).sum()
    scale = geometry.tabulate(profile_table).norm() * type_table.norm()
    assert abs(left - right) <= 1e-13 * scale


@pytest.mark.parametrize(("field_size", "vc_dim"), SIZES)
def test_whole_numbers_are_added_exactly(field_size, vc_dim):
    """Nothing but additions: no rounding, and no sum of non-negative states below 0."""
    geometry = Geometry(vc_dim, field_size)
    table = torch.randint(0, 1000, (geometry.num_profiles, 2)).float()
    dense = geometry.incidence().double() @ table.double()
    assert torch.equal(geometry.tabulate(table).double(), dense)


def test_small_states_keep_their_digits_beside_large_ones():
    geometry = Geometry(3, 5)
    table = torch.full((25, 1), 1e-20, dtype=torch.float64)
    table[7] = 1e10
    free = ~geometry.incidence()[:, 7]
    expected = torch.full((int(free.sum()), 1), 5e-20, dtype=torch.float64)
    torch.testing.assert_close(geometry.tabulate(table)[free], expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("method", radon.METHODS)
@pytest.mark.parametrize(("field_size", "vc_dim"), SMALL)
def test_gradients_of_both_orders(field_size, vc_dim, method):
    geometry = Geometry(vc_dim, field_size)
    profile_table, type_table = tables(geometry, 2, width=1)
    for transform, table in (
        (geometry.tabulate, profile_table),
        (geometry.backproject, type_table),
    ):
        own = table.requires_grad_()
        run = lambda x, transform=transform: transform(x, method)  # noqa: E731
        assert torch.autograd.gradcheck(run, own, fast_mode=True)
        # A linear map has no second derivative: check that of its square.
        square = lambda x, run=run: run(x).square()  # noqa: E731
        assert torch.autograd.gradgradcheck(square, own, fast_mode=True)


@pytest.mark.parametrize("method", radon.METHODS)
@pytest.mark.parametrize(("field_size", "vc_dim"), [(3, 1), (5, 2), (5, 3), (3, 4)])
def test_batches_and_strides(field_size, vc_dim, method):
    geometry = Geometry(vc_dim, field_size)
    profile_table, type_table = tables(geometry, 2, 3, width=4)
    incidence = geometry.incidence().double()
    for transform, table, matrix in (
        (geometry.tabulate, profile_table, incidence),
        (geometry.backproject, type_table, incidence.mT),
    ):
        expected = matrix @ table
        assert relative_rms(transform(table, method), expected) <= 1e-12
        turned = table.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
        assert not turned.is_contiguous()
        assert relative_rms(transform(turned, method), expected) <= 1e-12
        spread = table[:1, :, :, :1].expand(2, -1, -1, 5)
        assert relative_rms(transform(spread, method), matrix @ spread) <= 1e-12
        assert transform(table[:0], method).shape == expected[:0].shape
        assert transform(table[..., :0], method).shape == expected[..., :0].shape


@pytest.mark.parametrize("method", radon.METHODS)
@pytest.mark.parametrize("block", [16, 48])
@pytest.mark.parametrize("width", [5, 16, 100])
def test_blocks_of_columns_change_nothing(width, block, method):
    geometry = Geometry(3, 5)
    profile_table, type_table = tables(geometry, 7, width=width)
    whole = geometry.tabulate(profile_table, method), geometry.backproject(type_table, method)
    sizes = {"SLAB_COLUMNS": (block, block), "WHOLE_ELEMENTS": 0}
    with mock.patch.multiple(radon, **sizes), poisoned_memory():
        cut = geometry.tabulate(profile_table, method), geometry.backproject(type_table, method)
    for first, second in zip(cut, whole, strict=True):
        assert relative_rms(first, second) <= 1e-14


@pytest.mark.parametrize("method", radon.METHODS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sums_are_at_least_fp32(dtype, method):
    geometry = Geometry(4, 7)
    profile_table, type_table = tables(geometry, dtype=dtype)
    for transform, table in (
        (geometry.tabulate, profile_table),
        (geometry.backproject, type_table),
    ):
        found, exact = transform(table, method), transform(table.double(), "dense")
        assert relative_rms(found, exact) <= max(torch.finfo(dtype).eps, 5e-7)
        # Rounded once, at the end.
        assert torch.equal(found, transform(table.float(), method).to(dtype))
    ones = torch.ones(geometry.num_profiles, 1, dtype=dtype)
    assert (geometry.tabulate(ones * 60, method) == torch.tensor(60 * 49.0).to(dtype)).all()


def test_the_result_is_never_the_input():
    for vc_dim in (1, 2, 3):
        geometry = Geometry(vc_dim, 3)
        table = torch.ones(geometry.num_profiles, 2)
        geometry.tabulate(table).zero_()
        assert table.all()


@pytest.mark.parametrize("method", radon.METHODS)
def test_compiles_to_one_graph_for_every_width(method):
    torch.compiler.reset()
    geometry = Geometry(3, 3)

    def there_and_back(table):
        return geometry.backproject(geometry.tabulate(table, method), method)

    compiled = torch.compile(there_and_back, fullgraph=True, dynamic=True, backend="aot_eager")
    for width in (3, 8):
        table = normal(2, geometry.num_profiles, width).requires_grad_()
        found, expected = compiled(table), there_and_back(table)
        assert torch.equal(found, expected)
        weight = normal(*found.shape, seed=2)
        grads = (torch.autograd.grad(x, table, weight)[0] for x in (found, expected))
        assert torch.equal(*grads)


def test_tables_first_asked_for_in_inference_mode_still_differentiate():
    geometry = Geometry(3, 17)  # a size that no other test asks for
    table = normal(geometry.num_profiles, 1)
    with torch.inference_mode():
        geometry.tabulate(table)
        geometry.backproject(geometry.tabulate(table))
    own = table.clone().requires_grad_()
    (grad,) = torch.autograd.grad(geometry.tabulate(own).sum(), own)
    assert (grad == geometry.num_directions).all()
