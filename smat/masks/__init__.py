"""Masks: who may see whom, as integers, without touching values."""

from smat.masks.assignment import TokenHash, agreeing_direction, type_through_cell
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
from smat.masks.vc import count_traces_of_sets, multi_read_vc_bound, shatters, vc_dimension

__all__ = [
    "BoundarySchedule",
    "SMatMask",
    "SMatWarning",
    "Segment",
    "TokenHash",
    "agreeing_direction",
    "count_traces_of_sets",
    "doubling",
    "kept",
    "multi_read_vc_bound",
    "none",
    "rebuilt",
    "schedule_from_dict",
    "shatters",
    "type_through_cell",
    "vc_dimension",
    "window",
]
