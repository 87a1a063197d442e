"""Finite geometry: integers only, true if there were no tokens."""

from smat.geometry.geometry import Geometry
from smat.geometry.scaling import default_num_distant, field_size_for

__all__ = ["Geometry", "default_num_distant", "field_size_for"]
