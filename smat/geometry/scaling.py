"""The field size that a sequence length and a VC dimension call for (Section 3, scaling)."""

from __future__ import annotations

from smat.geometry.field import next_prime


def default_num_distant(seq_len: int, chunk_size: int) -> int:
    """Place the boundary on a chunk edge near the middle: n = c floor(T / 2c).

    >>> default_num_distant(1024, 64), default_num_distant(1000, 64), default_num_distant(100, 64)
    (512, 448, 0)
    """
    return chunk_size * (seq_len // (2 * chunk_size))


def field_size_for(num_distant: int, vc_dim: int) -> int:
    """Return the smallest prime q with q^d >= n; at d = 1 the space is one point for any q.

    Integer arithmetic throughout: a floating-point root may fall on the wrong side of a
    perfect power.

    >>> [field_size_for(131072, vc_dim) for vc_dim in (2, 3, 4, 5)]
    [367, 53, 23, 11]
    >>> field_size_for(5**4, 4), field_size_for(5**4 + 1, 4)
    (5, 7)
    """
    if vc_dim == 1:
        return 2
    field_size = next_prime(round(num_distant ** (1.0 / vc_dim)) - 2)
    while field_size**vc_dim < num_distant:
        field_size = next_prime(field_size + 1)
    return field_size
