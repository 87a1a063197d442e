"""Layers: what owns parameters and mixes tokens."""

from smat.layers.gated_deltanet import DeltaNet, GatedDeltaNet
from smat.layers.mamba2 import Mamba2
from smat.layers.mixer import DistantMemory, Mixer
from smat.layers.span import MixerCache, Span

__all__ = [
    "DeltaNet",
    "DistantMemory",
    "GatedDeltaNet",
    "Mamba2",
    "Mixer",
    "MixerCache",
    "Span",
]
