"""The field-size rule, and bad input: a ValueError that repeats the numbers."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smat import Geometry
from smat.geometry.field import is_prime

SPACE = Geometry(vc_dim=3, field_size=5)  # 25 profiles, 6 directions, 30 types


def field_size_for(num_distant, vc_dim):
    return Geometry.for_distant(num_distant, vc_dim).field_size


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_field_size_is_the_smallest_prime_whose_power_reaches_n(num_distant, vc_dim):
    field_size = field_size_for(num_distant, vc_dim)
    assert is_prime(field_size)
    assert field_size**vc_dim >= num_distant
    smaller = next((p for p in range(field_size - 1, 1, -1) if is_prime(p)), 0)
    assert smaller**vc_dim < max(1, num_distant)


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
    assert Geometry.for_distant(10**6, 1).num_profiles == 1


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: Geometry(3, 4), ["4", "prime", "5"]),
        (lambda: Geometry(3, 1), ["1", "prime", "2"]),
        (lambda: Geometry(3, 0), ["0", "prime"]),
        (lambda: Geometry(3, -5), ["-5", "prime"]),
        (lambda: Geometry(3, 10**18), ["1000000000000000000", "prime", "1000000000000000003"]),
        (lambda: Geometry(3, 2**64), ["18446744073709551616", "2^64"]),
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
        (lambda: SPACE.type_index(torch.tensor(6), torch.tensor(0)), ["0..5", "6"]),
        (lambda: SPACE.type_index(torch.tensor(0), torch.tensor(5)), ["0..4", "5"]),
        (lambda: SPACE.type_index(torch.tensor([-1, 6]), torch.tensor(0)), ["0..5", "-1 to 6"]),
        (lambda: SPACE.offset_of(torch.tensor([0]), torch.tensor([25])), ["0..24", "25"]),
        (lambda: SPACE.offset_of(torch.tensor([6]), torch.tensor([0])), ["0..5", "6"]),
    ],
)
def test_errors_repeat_the_numbers(call, parts):
    with pytest.raises(ValueError, match=r".+") as raised:
        call()
    for part in parts:
        assert part in str(raised.value), f"{part!r} not in {raised.value}"


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (lambda: Geometry(2, 3.0), ["field_size", "3.0"]),
        (lambda: Geometry(2.0, 3), ["vc_dim", "2.0"]),
        (lambda: Geometry(True, 3), ["vc_dim", "True"]),
        (lambda: Geometry(2, "3"), ["field_size", "'3'"]),
        (lambda: Geometry(2, None), ["field_size", "None"]),
        (lambda: Geometry.for_distant(1e3, 2), ["num_distant", "1000.0"]),
        (lambda: Geometry.for_distant(1000, False), ["vc_dim", "False"]),
        (lambda: SPACE.type_index([0, 1], torch.tensor(0)), ["direction_index", "[0, 1]"]),
    ],
)
def test_what_is_no_integer_is_refused_by_name_and_value(call, parts):
    with pytest.raises(TypeError) as raised:
        call()
    for part in parts:
        assert part in str(raised.value), f"{part!r} not in {raised.value}"


def test_integers_of_any_kind_are_taken():
    geometry = Geometry(np.int64(3), torch.tensor(5))
    assert geometry == SPACE
    assert geometry.num_types == 30
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint64):
        direction, offset = torch.arange(30) // 5, torch.arange(30) % 5
        types = SPACE.type_index(direction.to(dtype), offset.to(dtype))
        assert types.dtype == torch.int64
        assert torch.equal(types, torch.arange(30))
        own = SPACE.offset_of(direction.to(dtype), torch.tensor([7]).to(dtype))
        assert torch.equal(own, SPACE.offset_of(direction, torch.tensor([7])))
    for dtype in (torch.float32, torch.complex64, torch.bool):
        with pytest.raises(ValueError, match=str(dtype)):
            SPACE.type_index(torch.zeros(3, dtype=dtype), torch.tensor(0))


def test_a_field_of_a_huge_prime_answers_at_once():
    geometry = Geometry(2, 10**18 + 9)
    assert geometry.num_profiles == geometry.num_types == 10**18 + 9
    assert Geometry.for_distant(10**30, 2).field_size == 10**15 + 37
