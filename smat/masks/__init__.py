"""Masks: who may see whom, as integers, without touching values."""

from smat.masks.boundary import (
    BoundarySchedule,
    Segment,
    doubling,
    kept,
    none,
    rebuilt,
    schedule_from_dict,
    window,
)
from smat.masks.mask import SMatMask, SMatWarning

__all__ = [
    "BoundarySchedule",
    "SMatMask",
    "SMatWarning",
    "Segment",
    "doubling",
    "kept",
    "none",
    "rebuilt",
    "schedule_from_dict",
    "window",
]
