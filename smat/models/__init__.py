"""Models of the paper's experiments: embed, mix, and read out the rows that count."""

from smat.models.mixers import Option
from smat.models.routing_model import RoutingModelConfig, SubsetRoutingModel
from smat.models.sequence_model import ModelConfig, SequenceModel

__all__ = ["ModelConfig", "Option", "RoutingModelConfig", "SequenceModel", "SubsetRoutingModel"]
