"""Arithmetic of the prime field: primes, and base-q digits of point numbers (Section 3)."""

from __future__ import annotations

import torch
from torch import Tensor


def is_prime(number: int) -> bool:
    """Say whether a whole number is prime.

    >>> [candidate for candidate in range(20) if is_prime(candidate)]
    [2, 3, 5, 7, 11, 13, 17, 19]
    """
    if number < 4:
        return number >= 2
    if number % 2 == 0:
        return False
    divisor = 3
    while divisor * divisor <= number:
        if number % divisor == 0:
            return False
        divisor += 2
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
    num_digits = digits.shape[-1]
    places = field_size ** torch.arange(num_digits - 1, -1, -1, device=digits.device)
    return (digits.long() * places).sum(-1)
