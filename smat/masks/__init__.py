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
from smat.masks.vc import (
    count_traces,
    count_traces_of_sets,
    multi_read_vc_bound,
    shattered_set,
    shatters,
    vc_dimension,
)

__all__ = [
    "BoundarySchedule",
    "SMatMask",
    "SMatWarning",
    "Segment",
    "count_traces",
    "count_traces_of_sets",
    "doubling",
    "kept",
    "multi_read_vc_bound",
    "none",
    "rebuilt",
    "schedule_from_dict",
    "shattered_set",
    "shatters",
    "vc_dimension",
    "window",
]
