"""SMat-Attention: causal linear attention with a mask of chosen VC dimension."""

from smat.geometry import Geometry
from smat.masks import (
    SMatMask,
    SMatWarning,
    doubling,
    kept,
    none,
    rebuilt,
    vc_dimension,
    window,
)
from smat.ops import SMatState, reference_attention, smat_attention

__all__ = [
    "Geometry",
    "SMatMask",
    "SMatState",
    "SMatWarning",
    "doubling",
    "kept",
    "none",
    "rebuilt",
    "reference_attention",
    "smat_attention",
    "vc_dimension",
    "window",
]
__version__ = "0.1.0"
