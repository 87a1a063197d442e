"""Finite geometry: integers only, true if there were no tokens."""

from smat.geometry.geometry import Geometry

__all__ = ["Geometry"]
