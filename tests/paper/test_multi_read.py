"""Several reads per query: the support is a union of hyperplanes, of bounded VC dimension."""

import math

import pytest
import torch

from smat.geometry import Geometry
from smat.masks import SMatMask, multi_read_vc_bound, vc_dimension

pytestmark = pytest.mark.filterwarnings("ignore::smat.masks.SMatWarning")


@pytest.mark.parametrize("vc_dim", range(2, 12))
def test_four_reads_stay_below_the_published_bound(vc_dim):
    assert vc_dim < multi_read_vc_bound(vc_dim, 4) <= 25 * vc_dim - 24


def test_four_reads_at_two_dimensions_meet_the_published_bound():
    assert multi_read_vc_bound(2, 4) == 25 * 2 - 24


@pytest.mark.parametrize("vc_dim", [2, 3, 4, 7])
@pytest.mark.parametrize("num_reads", [2, 3, 4, 8, 50])
def test_the_bound_is_the_last_size_that_counting_allows(vc_dim, num_reads):
    ambient_dim = vc_dim - 1

    def allowed(size):
        return size <= ambient_dim * num_reads * math.log2(math.e * size / ambient_dim)

    size = multi_read_vc_bound(vc_dim, num_reads) - 2
    assert allowed(size)
    assert not any(allowed(larger) for larger in range(size + 1, 8 * size))


def test_one_read_and_one_dimension_are_the_theorem():
    assert [multi_read_vc_bound(vc_dim, 1) for vc_dim in (1, 2, 3)] == [1, 2, 3]
    assert multi_read_vc_bound(1, 4) == 1


@pytest.mark.parametrize("numbers", [(0, 4), (3, 0)])
def test_bad_numbers_are_repeated(numbers):
    with pytest.raises(ValueError, match=f"{numbers[0]} and {numbers[1]}"):
        multi_read_vc_bound(*numbers)


@pytest.mark.parametrize("num_reads", [2, 4])
@pytest.mark.parametrize(("vc_dim", "field_size"), [(2, 7), (3, 3), (3, 5)])
def test_masks_with_several_reads_keep_the_bound(vc_dim, field_size, num_reads):
    mask = SMatMask(96, vc_dim, 8, field_size)
    generator = torch.Generator().manual_seed(0)
    shape = (1, 96, num_reads)
    query_type = torch.randint(mask.geometry.num_types, shape, generator=generator)
    union = mask.dense(query_type=query_type)[0].any(0)
    dimension = vc_dimension(union)
    assert dimension <= multi_read_vc_bound(vc_dim, num_reads)
    # The upper bound with one read no longer holds, so several reads need a bound of their own.
    if (vc_dim, num_reads) == (3, 4):
        assert dimension > vc_dim


def test_pairs_of_lines_shatter_more_points_than_lines():
    incidence = Geometry(vc_dim=3, field_size=5).incidence()
    first, second = torch.combinations(torch.arange(len(incidence)), 2).T
    assert vc_dimension(incidence) == 2
    assert 2 < vc_dimension(incidence[first] | incidence[second]) <= multi_read_vc_bound(3, 2) - 2
