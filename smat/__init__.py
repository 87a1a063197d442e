"""SMat-Attention: causal linear attention with a mask of chosen VC dimension."""

from smat import schedules
from smat.distributed import context_parallel
from smat.geometry import Geometry
from smat.layers import GatedDeltaNet, Mamba2, SMatAttention
from smat.masks import SMatMask, SMatWarning, vc_dimension
from smat.ops import SMatState, reference_attention, smat_attention

__all__ = [
    "GatedDeltaNet",
    "Geometry",
    "Mamba2",
    "SMatAttention",
    "SMatMask",
    "SMatState",
    "SMatWarning",
    "context_parallel",
    "reference_attention",
    "schedules",
    "smat_attention",
    "vc_dimension",
]
__version__ = "0.1.0"
