"""Layers: what owns parameters and mixes tokens."""

from smat.layers.content_routing import ContentRouting
from smat.layers.gated_deltanet import DeltaNet, GatedDeltaNet
from smat.layers.hashed_routing import Assignment, HashedRouting, PositionalRouting, Routing
from smat.layers.log_linear import LogLinearGatedDeltaNet, LogLinearMamba2
from smat.layers.mamba2 import Mamba2
from smat.layers.mixer import DistantMemory, Mixer
from smat.layers.smat_attention import SMatAttention
from smat.layers.softmax_attention import SoftmaxAttention
from smat.layers.span import MixerCache, Span

__all__ = [
    "Assignment",
    "ContentRouting",
    "DeltaNet",
    "DistantMemory",
    "GatedDeltaNet",
    "HashedRouting",
    "LogLinearGatedDeltaNet",
    "LogLinearMamba2",
    "Mamba2",
    "Mixer",
    "MixerCache",
    "PositionalRouting",
    "Routing",
    "SMatAttention",
    "SoftmaxAttention",
    "Span",
]
