"""Masks for layers that meet many lengths: one of a horizon, or one for each length."""

from __future__ import annotations

from smat.masks import BoundarySchedule, SMatMask


def mask_recipe(
    horizon: int | None,
    vc_dim: int,
    chunk_size: int,
    field_size: int | None,
    boundary: BoundarySchedule | None,
) -> SMatMask:
    """Return the mask of a horizon, its boundary kept at every length; or a recipe for any length.

    >>> mask_recipe(1024, 3, 64, None, None).describe()
    'SMatMask: T = 1024, d = 3, q = 11, n = 512, c = 64, boundary = kept(512)'
    """
    if horizon is None:
        if boundary is not None and boundary.horizon_free and field_size is None and vc_dim > 1:
            raise ValueError(
                f"a boundary {boundary.describe()} has no geometry without a horizon or field_size"
            )
        length = 1 if boundary is None else max(1, getattr(boundary, "num_distant", 1))
        return SMatMask(length, vc_dim, chunk_size, field_size, boundary)
    mask = SMatMask(horizon, vc_dim, chunk_size, field_size, boundary)
    if mask.boundary.horizon_free:
        return mask
    return SMatMask(horizon, vc_dim, chunk_size, mask.geometry.field_size, mask.schedule)
