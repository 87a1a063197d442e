"""Layers: what owns parameters and mixes tokens."""

from smat.layers.balance import balance_loss, balance_weight, sum_balance_losses
from smat.layers.content_routing import ContentRouting
from smat.layers.directed_routing import DirectedRouting
from smat.layers.gated_deltanet import DeltaNet, GatedDeltaNet
from smat.layers.hashed_routing import Assignment, HashedRouting, PositionalRouting, Routing
from smat.layers.log_linear import LogLinearGatedDeltaNet, LogLinearMamba2
from smat.layers.mamba2 import Mamba2
from smat.layers.mixer import DistantMemory, Mixer
from smat.layers.mixture_of_memories import MixtureOfMemories
from smat.layers.profile_memory import ProfileMemory
from smat.layers.routing import LearnedRouting
from smat.layers.selectors import FactoredTopTypes, OwnCell, OwnHyperplane, TopTypes
from smat.layers.smat_attention import SMatAttention
from smat.layers.softmax_attention import SoftmaxAttention
from smat.layers.span import MixerCache, Span
from smat.layers.transported_memory import TransportedMemory

__all__ = [
    "Assignment",
    "ContentRouting",
    "DeltaNet",
    "DirectedRouting",
    "DistantMemory",
    "FactoredTopTypes",
    "GatedDeltaNet",
    "HashedRouting",
    "LearnedRouting",
    "LogLinearGatedDeltaNet",
    "LogLinearMamba2",
    "Mamba2",
    "Mixer",
    "MixerCache",
    "MixtureOfMemories",
    "OwnCell",
    "OwnHyperplane",
    "PositionalRouting",
    "ProfileMemory",
    "Routing",
    "SMatAttention",
    "SoftmaxAttention",
    "Span",
    "TopTypes",
    "TransportedMemory",
    "balance_loss",
    "balance_weight",
    "sum_balance_losses",
]
