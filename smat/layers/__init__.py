"""Layers: what owns parameters and mixes tokens."""

from smat.layers.call import CallInfo, LayerCaches, MixerCache
from smat.layers.gated_deltanet import DeltaNet, GatedDeltaNet
from smat.layers.log_linear import LogLinearGatedDeltaNet, LogLinearMamba2
from smat.layers.mamba2 import Mamba2
from smat.layers.memory.memory import Memory, ProfileMemory, TransportedMemory, kept_mask
from smat.layers.memory.settings import MemorySettings
from smat.layers.mixer import Mixer
from smat.layers.mixture_of_memories import MixtureOfMemories
from smat.layers.routing.balance import (
    balance_weight,
    hyperplane_balance,
    sum_balance_losses,
)
from smat.layers.routing.hashed import DirectedRouting, HashedRouting
from smat.layers.routing.learned import LearnedRouting
from smat.layers.routing.request import LearnedRequest, RequestHyperplane
from smat.layers.routing.routers import (
    ContentRouting,
    PositionalRouting,
    Router,
    balance_loss,
)
from smat.layers.routing.selectors import (
    FactoredTopTypes,
    OwnCell,
    OwnHyperplane,
    TopTypes,
)
from smat.layers.smat_attention import SMatAttention
from smat.layers.softmax_attention import SoftmaxAttention

__all__ = [
    "CallInfo", "ContentRouting", "DeltaNet", "DirectedRouting", "FactoredTopTypes",
    "GatedDeltaNet", "HashedRouting", "LayerCaches", "LearnedRequest", "LearnedRouting",
    "LogLinearGatedDeltaNet", "LogLinearMamba2", "Mamba2", "Memory", "MemorySettings", "Mixer",
    "MixerCache", "MixtureOfMemories", "OwnCell", "OwnHyperplane", "PositionalRouting",
    "ProfileMemory", "RequestHyperplane", "Router", "SMatAttention", "SoftmaxAttention", "TopTypes",
    "TransportedMemory", "balance_loss", "balance_weight", "hyperplane_balance", "kept_mask",
    "sum_balance_losses",
]  # fmt: skip
