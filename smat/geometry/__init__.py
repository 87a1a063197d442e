"""Finite geometry: integers only, true if there were no tokens."""

from smat.geometry.field import default_num_distant, field_size_for
from smat.geometry.geometry import Geometry

__all__ = ["Geometry", "default_num_distant", "field_size_for"]
