"""What tokens bring to a table, or take from it, as kernels address it."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor, float32

from smat.ops.smat.triton.groups import Visits
from smat.ops.triton.launch import dot_precision

# Visits at a time, of about n^(1/d); with the other's number either dtype spills somewhere.
HALF_TILE, TILE = 16, 32


class Side(NamedTuple):
    """Keys and values, or queries and the gradients of their answers, of all tokens.

    A row is a head of values; it has HEADS heads of `right`, and as many of the vectors beside it.
    Heads of `right` may share one of `left`.
    """

    left: Tensor  # (B, T, ., K), before the feature map
    right: Tensor  # (B, T, rows HEADS, V)
    scale: Tensor | None  # (B, T, rows HEADS)
    weight: Tensor | None  # (B, T, rows HEADS, reads)
    last: Tensor | None  # (B, T, rows HEADS), what stands behind `right`, negative; None is 1
    num_rows: int  # of a batch row
    feature_map: str
    has_sums: bool  # whether tables hold the sums that make the normaliser

    @property
    def num_keys(self) -> int:
        """K."""
        return self.left.shape[-1]

    @property
    def num_values(self) -> int:
        """V."""
        return self.right.shape[-1]

    @property
    def num_columns(self) -> int:
        """Of a table: the state, and the sums behind it."""
        return self.num_keys * (self.num_values + self.has_sums)

    def meta(self, visits: Visits) -> dict[str, Any]:
        """The settings that all kernels are compiled for."""
        return {
            "K": self.num_keys, "V": self.num_values, "SUMS": self.has_sums,
            "MAP": self.feature_map, "HEADS": visits.heads, "READS": visits.reads,
            "SHARE": self.num_rows * visits.heads // self.left.shape[2],
            "PRECISION": dot_precision(self.left),
            "TILE": TILE if self.left.dtype == float32 else HALF_TILE,
        }  # fmt: skip


def block_size(size: int) -> int:
    """Choose how many numbers of a vector a tile holds."""
    return min(max(16, triton.next_power_of_2(size)), 64)
