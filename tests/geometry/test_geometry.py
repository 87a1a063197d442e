"""The field-size rule, and bad input: a ValueError that repeats the numbers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smat import Geometry
from smat.geometry import default_num_distant, field_size_for
from smat.geometry.field import is_prime

SPACE = Geometry(vc_dim=3, field_size=5)  # 25 profiles, 6 directions, 30 types


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_field_size_is_the_smallest_prime_whose_power_reaches_n(num_distant, vc_dim):
    field_size = field_size_for(num_distant, vc_dim)
    assert is_prime(field_size)
    assert field_size**vc_dim >= num_distant
    smaller = next((p for p in range(field_size - 1, 1, -1) if is_prime(p)), 0)
    assert smaller**vc_dim < max(1, num_distant)
    assert Geometry.for_distant(num_distant, vc_dim) == Geometry(vc_dim, field_size)


@pytest.mark.parametrize("prime", [2, 3, 101, 997])
@pytest.mark.parametrize("vc_dim", [2, 3, 4, 5, 7])
def test_perfect_powers_fall_on_the_right_side(prime, vc_dim):
    assert field_size_for(prime**vc_dim, vc_dim) == prime
    assert field_size_for(prime**vc_dim + 1, vc_dim) > prime
    assert field_size_for(prime**vc_dim - 1, vc_dim) == prime


def test_field_sizes_of_the_paper():
    assert [field_size_for(131072, vc_dim) for vc_dim in (2, 3, 4)] == [367, 53, 23]
    assert field_size_for(512, 3) == 11
    assert field_size_for(512, 4) == 5


def test_one_dimension_is_one_point_on_one_hyperplane():
    for field_size in (2, 3, 11):
        geometry = Geometry(1, field_size)
        assert (geometry.num_profiles, geometry.num_types, geometry.num_directions) == (1, 1, 0)
        assert geometry.points().shape == (1, 0)
        assert geometry.directions().shape == (0, 0)
        assert geometry.incidence().tolist() == [[True]]
        assert geometry.witness_types().tolist() == [0]
    assert Geometry.for_distant(10**6, 1).num_profiles == 1


@given(st.integers(1, 10**6), st.integers(1, 512))
def test_the_boundary_is_a_chunk_edge_in_the_first_half(seq_len, chunk_size):
    num_distant = default_num_distant(seq_len, chunk_size)
    assert num_distant % chunk_size == 0
    assert 2 * num_distant <= seq_len < 2 * (num_distant + chunk_size)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: Geometry(3, 4), ["4", "prime", "5"]),
        (lambda: Geometry(3, 1), ["1", "prime", "2"]),
        (lambda: Geometry(3, 0), ["0", "prime"]),
        (lambda: Geometry(3, -5), ["-5", "prime"]),
        (lambda: Geometry(0, 5), ["vc_dim", "0"]),
        (lambda: Geometry.for_distant(-1, 3), ["num_distant", "-1"]),
        (lambda: Geometry.for_distant(10, 0), ["vc_dim", "0"]),
        (lambda: SPACE.tabulate(torch.zeros(24, 2)), ["25", "(24, 2)", "profiles"]),
        (lambda: SPACE.tabulate(torch.zeros(25)), ["25", "(25,)"]),
        (lambda: SPACE.tabulate(torch.zeros(25, 2).long()), ["floating", "torch.int64"]),
        (lambda: SPACE.tabulate(torch.zeros(25, 2), "fourier"), ["factored", "'fourier'"]),
        (lambda: SPACE.backproject(torch.zeros(25, 2)), ["30", "(25, 2)", "types"]),
        (lambda: SPACE.backproject(torch.zeros(30, 2), "fourier"), ["dense", "'fourier'"]),
        (lambda: SPACE.tabulation_cost("fourier"), ["algorithm2", "'fourier'"]),
        (lambda: SPACE.profile_index(torch.zeros(4, 3).long()), ["2 coordinates", "3"]),
        (lambda: SPACE.profile_index(torch.tensor([[1, 5]])), ["[0, 5)", "1 to 5"]),
        (lambda: SPACE.type_index(torch.tensor(6), torch.tensor(0)), ["[0, 6)", "6"]),
        (lambda: SPACE.type_index(torch.tensor(0), torch.tensor(5)), ["[0, 5)", "5"]),
        (lambda: SPACE.split_type(torch.tensor([0, 30])), ["[0, 30)", "0 to 30"]),
        (lambda: SPACE.split_type(torch.tensor([-1])), ["[0, 30)", "-1"]),
        (lambda: SPACE.offset_of(torch.tensor([0]), torch.tensor([25])), ["[0, 25)", "25"]),
        (lambda: SPACE.offset_of(torch.tensor([6]), torch.tensor([0])), ["[0, 6)", "6"]),
    ],
)
def test_errors_repeat_the_numbers(call, parts):
    with pytest.raises(ValueError, match=r".+") as raised:
        call()
    for part in parts:
        assert part in str(raised.value), f"{part!r} not in {raised.value}"
