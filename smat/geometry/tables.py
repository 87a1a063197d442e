"""One cache for the integer tables of a geometry, keyed by field size, dimension and device."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar

import torch

Table = TypeVar("Table")


def cached_table(
    build: Callable[[int, int, torch.device], Table],
) -> Callable[[int, int, torch.device], Table]:
    """Build a table once per (field_size, ambient_dim, device).

    The build leaves inference mode: a table first asked for inside it would otherwise be
    refused by every later backward pass.
    """

    @lru_cache(maxsize=64)
    @wraps(build)
    def build_once(field_size: int, ambient_dim: int, device: torch.device) -> Table:
        with torch.inference_mode(False):
            return build(field_size, ambient_dim, device)

    return build_once
