"""The prime field behind a mask: whole numbers, primes, base-q digits, and its size (Section 3)."""

from __future__ import annotations

from operator import index
from typing import SupportsIndex

import torch
from torch import Tensor

# No composite number below 2^64 passes the test of Miller and Rabin to all of these bases.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def check_integer(name: str, value: object, least: int) -> int:
    """Return a whole number as an int; refuse anything else, and what is below the least.

    >>> check_integer("seq_len", 32.5, least=1)
    Traceback (most recent call last):
    TypeError: seq_len must be an integer, but it is 32.5
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an integer, but it is {value!r}")
    if index(value) < least:
        raise ValueError(f"{name} must be {least} or more, but it is {value}")
    return index(value)


def check_index(name: str, values: Tensor | None, limit: int) -> None:
    """Refuse a tensor that does not hold integers in `[0, limit)`; None passes.

    >>> check_index("profile", torch.tensor([3, 25]), limit=25)
    Traceback (most recent call last):
    ValueError: profile must lie in 0..24, but it runs from 3 to 25
    """
    if values is None:
        return
    if not isinstance(values, Tensor):
        raise TypeError(f"{name} must be a tensor of integers, but it is {values!r}")
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, but its dtype is {values.dtype}")
    if values.numel():
        low, high = (int(bound) for bound in values.long().aminmax())
        if low < 0 or high >= limit:
            raise ValueError(f"{name} must lie in 0..{limit - 1}, but it runs from {low} to {high}")


def is_prime(number: int) -> bool:
    """Say whether a whole number below 2^64 is prime, at once for any of them.

    >>> [candidate for candidate in range(20) if is_prime(candidate)]
    [2, 3, 5, 7, 11, 13, 17, 19]
    """
    if number >= 1 << 64:
        raise ValueError(f"a prime must be below 2^64, got {number}")
    if number < 2 or any(number % prime == 0 for prime in _WITNESSES):
        return number in _WITNESSES
    # number - 1 = odd * 2^twos; a prime has no square roots of 1 other than 1 and -1.
    twos = ((number - 1) & (1 - number)).bit_length() - 1
    for witness in _WITNESSES:
        power = pow(witness, (number - 1) >> twos, number)
        if power != 1 and all(pow(power, 1 << k, number) != number - 1 for k in range(twos)):
            return False
    return True


def next_prime(at_least: int) -> int:
    """Return the smallest prime that is not below the given number.

    >>> next_prime(14), next_prime(17), next_prime(-3)
    (17, 17, 2)
    """
    candidate = max(2, at_least)
    while not is_prime(candidate):
        candidate += 1
    return candidate


def to_digits(numbers: Tensor, field_size: int, num_digits: int) -> Tensor:
    """Write numbers in base q, most significant digit first: (...) -> (..., num_digits).

    >>> to_digits(torch.tensor([5, 8]), field_size=3, num_digits=2)
    tensor([[1, 2],
            [2, 2]])
    """
    places = field_size ** torch.arange(num_digits - 1, -1, -1, device=numbers.device)
    return numbers.long().unsqueeze(-1) // places % field_size


def from_digits(digits: Tensor, field_size: int) -> Tensor:
    """Read base-q digits, most significant first: (..., num_digits) -> (...).

    >>> from_digits(torch.tensor([[1, 2], [2, 2]]), field_size=3)
    tensor([5, 8])
    """
    places = field_size ** torch.arange(digits.shape[-1] - 1, -1, -1, device=digits.device)
    return (digits.long() * places).sum(-1)


def default_num_distant(seq_len: int, chunk_size: int) -> int:
    """Place the boundary on a chunk edge near the middle: n = c floor(T / 2c).

    >>> default_num_distant(1024, 64), default_num_distant(1000, 64), default_num_distant(100, 64)
    (512, 448, 0)
    """
    return chunk_size * (seq_len // (2 * chunk_size))


def field_size_for(num_distant: int, vc_dim: int) -> int:
    """Return the smallest prime q with q^d >= n; at d = 1 the space is one point for any q.

    >>> [field_size_for(131072, vc_dim) for vc_dim in (2, 3, 4, 5)]
    [367, 53, 23, 11]
    >>> field_size_for(5**4, 4), field_size_for(5**4 + 1, 4)
    (5, 7)
    """
    check_integer("num_distant", num_distant, least=0)
    if check_integer("vc_dim", vc_dim, least=1) == 1:
        return 2
    # A floating-point root may fall on the wrong side of a perfect power: whole numbers decide.
    field_size = next_prime(round(num_distant ** (1.0 / vc_dim)) - 2)
    while field_size**vc_dim < num_distant:
        field_size = next_prime(field_size + 1)
    return field_size
