"""Refuse tensors that do not fit a mask, repeating their numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def check_shapes(given: Mapping[str, Tensor | None], length: int | None) -> int | None:
    """Refuse tensors that are not `(B, T, H)` with one T; return that T, or else the length."""
    for name, value in given.items():
        if value is None:
            continue
        if value.ndim != 3 or length not in (None, value.shape[1]):
            wanted = "T" if length is None else length
            raise ValueError(f"{name} must be (B, {wanted}, H), but it is {tuple(value.shape)}")
        length = value.shape[1]
    log_decay = given.get("log_decay")
    if log_decay is not None and not bool((log_decay <= 0).all()):
        raise ValueError(f"log_decay must be 0 or less, but its largest is {log_decay.max()}")
    return length


def check_index(name: str, index: Tensor | None, limit: int) -> None:
    """Refuse an index that is not an integer in `[0, limit)`; None passes.

    >>> check_index("profile", torch.tensor([3, 25]), limit=25)
    Traceback (most recent call last):
    ValueError: profile must lie in 0..24, but it runs from 3 to 25
    """
    if index is None:
        return
    if index.dtype.is_floating_point or index.dtype == torch.bool:
        raise ValueError(f"{name} must hold integers, but its dtype is {index.dtype}")
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= limit):
        low, high = int(index.min()), int(index.max())
        raise ValueError(f"{name} must lie in 0..{limit - 1}, but it runs from {low} to {high}")
