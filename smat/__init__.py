"""SMat-Attention: causal linear attention with a mask of chosen VC dimension."""

from smat.geometry import Geometry

__all__ = ["Geometry"]
__version__ = "0.1.0"
