"""The prime field behind a mask, its points and its hyperplanes (Section 3, equation 4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from operator import index
from typing import SupportsIndex, TypeVar

import torch
from torch import Tensor

Table = TypeVar("Table")
Build = Callable[[int, int, torch.device], Table]  # of field_size and ambient_dim

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
    """Return the smallest prime that is not below the given number."""
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
    """Read base-q digits, most significant first: (..., num_digits) -> (...)."""
    places = field_size ** torch.arange(digits.shape[-1] - 1, -1, -1, device=digits.device)
    return (digits.long() * places).sum(-1)


def cached_table(build: Build[Table]) -> Build[Table]:
    """Build a table once, and outside inference mode, which later backward passes would refuse."""
    return lru_cache(maxsize=64)(torch.inference_mode(False)(build))


def count_directions(field_size: int, ambient_dim: int) -> int:
    """Count normalised directions: (q^D - 1) / (q - 1)."""
    return int((field_size**ambient_dim - 1) // (field_size - 1))


@cached_table
def points(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """List every point of F_q^D in counting order, (P, D)."""
    return to_digits(torch.arange(field_size**ambient_dim, device=device), field_size, ambient_dim)


@cached_table
def directions(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """List every direction with a leading 1, (A, D): by its place, then in counting order."""
    leading = [torch.zeros(0, ambient_dim, dtype=torch.long, device=device)]
    for num_zeros in range(ambient_dim):
        tail = points(field_size, ambient_dim - num_zeros - 1, device)
        head = tail.new_zeros(len(tail), num_zeros + 1)
        head[:, -1] = 1
        leading.append(torch.cat([head, tail], dim=-1))
    return torch.cat(leading)


@cached_table
def offsets(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """Tabulate a . x mod q for every direction and point, (A, P)."""
    all_directions = directions(field_size, ambient_dim, device)
    all_points = points(field_size, ambient_dim, device)
    total = torch.zeros(len(all_directions), len(all_points), dtype=torch.long, device=device)
    for axis in range(ambient_dim):  # integer matrix products are slow or missing on some devices
        total += all_directions[:, axis, None] * all_points[None, :, axis]
    return total % field_size


@cached_table
def incidence(field_size: int, ambient_dim: int, device: torch.device) -> Tensor:
    """Mark which point lies on which hyperplane, C of equation 7, (B, P) bool."""
    if ambient_dim == 0:
        return torch.ones(1, 1, dtype=torch.bool, device=device)
    offset = torch.arange(field_size, device=device).unsqueeze(1)
    return (offsets(field_size, ambient_dim, device).unsqueeze(1) == offset).flatten(0, 1)
