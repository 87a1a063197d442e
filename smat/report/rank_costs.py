"""What ranks that hold a sequence together send and hold, on paper: see docs/ranks.md."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

from smat.masks import SMatMask, SMatWarning

TENSORS = 18  # as long as the share and as wide as a head, of one layer at work (smat bench ranks)
TABLES = 6  # of profiles or types, at work at once


class RankCosts(NamedTuple):
    """A layer of so many heads; states are fp32, keys and values of softmax attention bf16.

    >>> costs = RankCosts(heads=16, key_dim=64, value_dim=64)
    >>> costs.sent(1_000_000, vc_dim=1), costs.sent_by_gathering(8)
    (532480, 7340032)
    """

    heads: int
    key_dim: int
    value_dim: int
    layers: int = 24
    memory: float = 80e9  # of a device

    @property
    def state(self) -> int:
        """The bytes of a state of every head, its normaliser included."""
        return self.heads * self.key_dim * (self.value_dim + 1) * 4

    def sent(self, seq_len: int, vc_dim: int) -> int:
        """What a rank sends in a step: a table and a window on, their gradients back."""
        return 2 * self.state * (profiles(seq_len, vc_dim) * (vc_dim > 1) + 1)

    def sent_by_gathering(self, ranks: int) -> int:
        """What every rank sends if all get the states and transitions of all, both ways."""
        wide = self.key_dim * (self.value_dim + self.key_dim) * 4
        return 2 * (ranks - 1) * self.heads * wide

    def sent_by_ring_attention(self, seq_len: int, ranks: int) -> int:
        """Keys and values once around, and again with their gradients."""
        own = seq_len // ranks * self.heads * (self.key_dim + self.value_dim) * 2
        return 3 * (ranks - 1) * own

    def held(self, seq_len: int, vc_dim: int, ranks: int) -> float:
        """What a rank holds: the inputs of all layers, one layer at work, its tables."""
        width = self.heads * self.value_dim
        own = seq_len / ranks * (self.layers * width * 2 + TENSORS * width * 4)
        return own + TABLES * self.state * profiles(seq_len, vc_dim) * (vc_dim > 1)

    def longest(self, vc_dim: int, ranks: int) -> int:
        """Return the length that fits, in thousands of tokens, rounded down to two digits."""
        least, most = 1, 1 << 30
        while most - least > 1:
            middle = (least + most) // 2
            fits = self.held(1000 * middle, vc_dim, ranks) <= self.memory
            least, most = (middle, most) if fits else (least, middle)
        digits = 10 ** max(0, len(str(least)) - 2)
        return 1000 * (least // digits * digits)


def profiles(seq_len: int, vc_dim: int) -> int:
    """Return P for a sequence whose first half is distant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SMatWarning)
        return SMatMask(seq_len, vc_dim).geometry.num_profiles


def sent_rows(costs: RankCosts, lengths: list[int], counts: list[int]) -> list[dict[str, Any]]:
    """List what a rank sends in a step of one layer, for lengths and numbers of ranks."""
    return [
        {
            "seq_len": length,
            "ranks": ranks,
            **{f"d{d}_bytes": costs.sent(length, d) for d in (1, 2, 3, 4)},
            "gathered_bytes": costs.sent_by_gathering(ranks),
            "ring_bytes": costs.sent_by_ring_attention(length, ranks),
        }
        for length in lengths
        for ranks in counts
    ]


def longest_rows(costs: RankCosts, counts: list[int]) -> list[dict[str, Any]]:
    """List the longest sequences, and what part of the memory then is tables."""
    rows = []
    for ranks in counts:
        for d in (1, 2, 3, 4):
            length = costs.longest(d, ranks)
            tables = TABLES * costs.state * profiles(length, d) * (d > 1)
            share = tables / costs.held(length, d, ranks)
            rows.append({"ranks": ranks, "vc_dim": d, "seq_len": length, "in_tables": share})
    return rows
