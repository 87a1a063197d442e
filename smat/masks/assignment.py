"""Give keys a profile and queries a type: by position, by hashed content, by rule (Section 3)."""

from __future__ import annotations

from torch import Tensor

from smat.geometry import Geometry


def positional_profile(geometry: Geometry, position: Tensor) -> Tensor:
    """Deal the points out to the keys in turn: prof(j) = j mod P.

    >>> import torch
    >>> positional_profile(Geometry(vc_dim=2, field_size=3), torch.arange(5))
    tensor([0, 1, 2, 0, 1])

    Paper: j - 1 = `position` (0-based here), P = `geometry.num_profiles`.
    """
    return position.long() % geometry.num_profiles


def positional_type(geometry: Geometry, recent_index: Tensor) -> Tensor:
    """Deal the hyperplanes out to the recent queries in turn: type(i) = i mod B, i from 1.

    >>> import torch
    >>> positional_type(Geometry(vc_dim=2, field_size=3), torch.arange(5))
    tensor([1, 2, 0, 1, 2])

    Paper: i - 1 = `recent_index` (0-based here), B = `geometry.num_types`.
    """
    return (recent_index.long() + 1) % geometry.num_types
