"""Some heads of the batch at a time: what bounds the memory of the op.

G heads of queries, or M heads of values, share a key head. A slice takes some key heads of some
batch rows, N of them in all, and all or some of the M heads of values of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

CPU_TOKENS, OTHER_TOKENS = 1 << 14, 1 << 22  # tokens x heads of values of a slice
EVERY = slice(None)


class HeadSlice(NamedTuple):
    """Some key heads of some batch rows of one sequence, N in all, with M heads of values each."""

    batch: slice
    heads: slice
    values: slice
    tokens: slice
    num_heads: int  # of keys, in all

    def of_keys(self, x: Tensor) -> Tensor:
        """View what keys have, or the G heads of queries of each: (b, h, G, t, ...)."""
        by_key = x.unflatten(2, (self.num_heads, -1))
        return _heads_first(by_key[self.batch, self.tokens, self.heads])

    def of_values(self, x: Tensor) -> Tensor:
        """View what the heads of values have, or the answers: (b, h, M, t, ...)."""
        by_key = x.unflatten(2, (self.num_heads, -1))
        return _heads_first(by_key[self.batch, self.tokens, self.heads, self.values])

    def write(self, onto: Tensor, x: Tensor) -> None:
        """Write what the heads of values have."""
        view = self.of_values(onto)
        view.copy_(x.reshape(view.shape))

    def add(self, onto: Tensor, x: Tensor) -> None:
        """Write what keys and queries have, or add it to what other heads of values gave."""
        view = self.of_keys(onto)
        if self.values.start:
            view += x.reshape(view.shape)
        else:
            view.copy_(x.reshape(view.shape))


def _heads_first(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1, *range(4, x.ndim))


def cut_slices(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Iterator[HeadSlice]:
    """Cut keys (B, T, Hk, K) and values (B, T, Hv, V) into slices of one sequence each.

    >>> import torch
    >>> k = torch.empty(1, 1 << 16, 2, 4)  # a head of so many tokens is a slice
    >>> [part.heads for part in cut_slices(k, k, None)]
    [slice(0, 1, None), slice(1, 2, None)]
    """
    num_batch, length, num_heads = k.shape[:3]
    num_values = v.shape[2] // num_heads
    edges = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    budget = CPU_TOKENS if k.device.type == "cpu" else OTHER_TOKENS
    for start, stop in itertools.pairwise(edges):
        if stop == start:
            continue
        fits = budget // (stop - start)
        cuts = (
            _cut(num_batch, fits // (num_values * num_heads)),
            _cut(num_heads, fits // num_values),
            _cut(num_values, fits) if num_values > 1 else [EVERY],
        )
        for batch, heads, values in itertools.product(*cuts):
            yield HeadSlice(batch, heads, values, slice(start, stop), num_heads)


def _cut(total: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]
