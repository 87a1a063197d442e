"""Masks for layers that meet many lengths: one of a horizon, or one for each length."""

from __future__ import annotations

from collections.abc import Mapping

from smat.masks import BoundarySchedule, SMatMask, kept


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


def kept_mask(length: int, vc_dim: int, chunk_size: int | None = None) -> SMatMask:
    """Return the mask of a length whose first half is distant, with a boundary that stays there.

    >>> kept_mask(64, 2).describe()
    'SMatMask: T = 64, d = 2, q = 7, n = 32, c = 16, boundary = kept(32)'

    Chunks are a quarter of the length unless given, at least 16 tokens: short lengths too have a
    distant block.
    """
    plain = SMatMask(length, vc_dim, max(16, length // 4) if chunk_size is None else chunk_size)
    return SMatMask(
        length, vc_dim, plain.chunk_size, plain.geometry.field_size, kept(plain.num_distant)
    )


def mask_of_length(masks: Mapping[int, SMatMask], length: int) -> SMatMask:
    """Return the mask of the shortest length that holds a call's, the longest one past all.

    >>> masks = {length: kept_mask(length, 2) for length in (64, 128)}
    >>> [mask_of_length(masks, length).seq_len for length in (5, 64, 65, 500)]
    [64, 64, 128, 128]
    """
    return masks[min((each for each in masks if each >= length), default=max(masks))]
