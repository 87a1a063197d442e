"""Say when the mask's VC dimension is proved to be d (lower bound of the theorem in Section 3)."""

from __future__ import annotations

import warnings
from functools import cache

from smat.geometry import Geometry


class SMatWarning(UserWarning):
    """A mask is valid, but a property that the paper proves for long sequences is not assured."""


def proof_applies(geometry: Geometry, num_distant: int, num_recent: int) -> bool:
    """Check what the proof asks of a block mask with positional assignment.

    >>> proof_applies(Geometry(vc_dim=4, field_size=5), num_distant=512, num_recent=512)
    True
    >>> proof_applies(Geometry(vc_dim=4, field_size=5), num_distant=128, num_recent=128)
    False

    P <= n, so that every basis point is some key's profile, and 2B <= m, so that every hyperplane
    is some query's type both before and after one recent key. At d = 1 the mask is L_T, and two
    tokens are enough.
    """
    if geometry.vc_dim == 1:
        return num_distant + num_recent >= 2
    return geometry.num_profiles <= num_distant and 2 * geometry.num_types <= num_recent


@cache
def warn_once(seq_len: int, num_distant: int, geometry: Geometry) -> None:
    """Say, once per process for the same numbers, that the proof does not apply."""
    warnings.warn(
        f"VC = {geometry.vc_dim} is not guaranteed at T = {seq_len}, n = {num_distant}, "
        f"m = {seq_len - num_distant}: q = {geometry.field_size} has P = {geometry.num_profiles} "
        f"and B = {geometry.num_types}, but the proof needs P <= n and 2B <= m. The mask is valid "
        "and causal all the same; a longer sequence, a smaller vc_dim or a smaller field_size "
        "would restore the guarantee.",
        SMatWarning,
        stacklevel=3,
    )
