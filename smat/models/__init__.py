"""Models of the paper's experiments: embed, mix, and read out the rows that count."""

from smat.models.config import ModelConfig, RoutingModelConfig, build_model
from smat.models.routing_model import SubsetRoutingModel
from smat.models.sequence_model import SequenceModel

__all__ = [
    "ModelConfig",
    "RoutingModelConfig",
    "SequenceModel",
    "SubsetRoutingModel",
    "build_model",
]
