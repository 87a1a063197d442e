"""The sizes and costs that a length and a VC dimension imply (Section 3, Theorems 2 and 3)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from smat.masks.mask import SMatMask, SMatWarning

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class CacheShape:
    """What one decode cache holds a copy of: heads, feature and value sizes, batch and type.

    >>> CacheShape(heads=1, key_dim=32, value_dim=32, batch=64, dtype="fp32").bytes_per_state
    270336

    A state is an r x p matrix; p is the value dimension and one more column for the normaliser.
    """

    heads: int = 1
    key_dim: int = 32
    value_dim: int = 32
    batch: int = 1
    dtype: str = "fp32"

    def __post_init__(self) -> None:
        for name in ("heads", "key_dim", "value_dim", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, but it is {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ValueError(f"dtype must be one of {known}, but it is {self.dtype}")

    @property
    def bytes_per_state(self) -> int:
        """The bytes of one state for every sequence of the batch and every head."""
        numbers = self.batch * self.heads * self.key_dim * (self.value_dim + 1)
        return numbers * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class GeometryRow:
    """One line of the table: all that T and d fix.

    Paper: q = `field_size`, P = `num_profiles`, B = `num_types`, n = `num_distant`,
    m = `num_recent`; the cache holds B + 1 states (Section 3.3).
    """

    vc_dim: int
    field_size: int
    num_profiles: int
    num_types: int
    num_distant: int
    num_recent: int
    guarantees_vc_dim: bool
    additions_algorithm2: int
    additions_factored: int
    cache_states: int
    cache_bytes: int


def geometry_row(
    seq_len: int, vc_dim: int, cache: CacheShape | None = None, chunk_size: int = 64
) -> GeometryRow:
    """Work out the sizes, the cost of tabulation and the decode cache for one VC dimension.

    >>> row = geometry_row(seq_len=1024, vc_dim=3, cache=CacheShape(batch=64))
    >>> row.field_size, row.num_types, row.cache_bytes / 1e6
    (11, 132, 35.954688)

    A length without a distant block is plain linear attention: one running state and no tables.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SMatWarning)  # the row says whether VC = d is guaranteed
        mask = SMatMask(seq_len, vc_dim, chunk_size=chunk_size)
    geometry = mask.geometry
    has_distant = mask.num_distant > 0
    cache_states = geometry.num_types + 1 if has_distant else 1
    return GeometryRow(
        vc_dim,
        geometry.field_size,
        geometry.num_profiles,
        geometry.num_types,
        mask.num_distant,
        mask.num_recent,
        mask.guarantees_vc_dim,
        geometry.tabulation_cost("algorithm2") if has_distant else 0,
        geometry.tabulation_cost("factored") if has_distant else 0,
        cache_states,
        cache_states * (cache or CacheShape()).bytes_per_state,
    )


def format_bytes(num_bytes: float) -> str:
    """Write a size in decimal units; megabytes are whole, as in the paper's table.

    >>> [format_bytes(size) for size in (4224, 540672, 99483648, 3439214592, 27513716736)]
    ['4.2 kB', '0.5 MB', '99 MB', '3439 MB', '27.5 GB']
    """
    if num_bytes < 100_000:
        return f"{num_bytes / 1e3:.1f} kB"
    if num_bytes < 10_000_000_000:
        return f"{num_bytes / 1e6:.{int(num_bytes < 10_000_000)}f} MB"
    return f"{num_bytes / 1e9:.1f} GB"
