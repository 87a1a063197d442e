"""Primes and base-q digits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smat.geometry.field import from_digits, is_prime, next_prime, to_digits


def test_primes_are_those_of_the_sieve():
    sieve = torch.ones(5000, dtype=torch.bool)
    sieve[:2] = False
    for number in range(2, 71):
        sieve[number * number :: number] &= not sieve[number]
    assert [is_prime(number) for number in range(5000)] == sieve.tolist()
    assert not any(is_prime(number) for number in (-7, -1, 0, 1))


@pytest.mark.parametrize(
    ("number", "prime"),
    [
        (10**18 + 9, True),
        (10**18 + 7, False),
        (2**61 - 1, True),
        (2**64 - 59, True),
        ((10**9 + 7) * (10**9 + 9), False),
        (3215031751, False),  # passes the test to the bases 2, 3, 5 and 7
        (3825123056546413051, False),  # and this one to the first nine primes
        (561, False),
        (41041, False),
    ],
)
def test_large_primes_and_numbers_that_look_prime(number, prime):
    assert is_prime(number) == prime


@given(st.integers(-10, 20_000))
def test_next_prime_is_the_first_one(number):
    prime = next_prime(number)
    assert prime >= max(2, number)
    assert is_prime(prime)
    assert not any(is_prime(between) for between in range(number, prime))


@given(st.sampled_from([2, 3, 5, 23, 367]), st.integers(0, 5), st.data())
def test_digits_are_base_q_most_significant_first(field_size, num_digits, data):
    number = data.draw(st.integers(0, field_size**num_digits - 1))
    digits = []
    rest = number
    for _ in range(num_digits):
        rest, digit = divmod(rest, field_size)
        digits.insert(0, digit)
    found = to_digits(torch.tensor([number]), field_size, num_digits)
    assert found.dtype == torch.long
    assert found.tolist() == [digits]
    assert from_digits(found, field_size).tolist() == [number]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_digits_of_narrow_integers(dtype):
    numbers = torch.arange(250).to(dtype)
    digits = to_digits(numbers, 3, 6)
    assert torch.equal(from_digits(digits.to(dtype), 3), numbers.long())
