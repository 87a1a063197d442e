"""Configurations of models: frozen, of plain fields, each building one model for a task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from smat.models.routing_model import SubsetRoutingModel
from smat.models.sequence_model import SequenceModel


@dataclass(frozen=True)
class RoutingModelConfig:
    """A one-layer model of subset routing; see `SubsetRoutingModel`."""

    mixer: str
    vc_dim: int = 1
    width: int = 64
    head_dim: int = 32

    def build(self, task: Any) -> nn.Module:
        """Return the model for a task."""
        return SubsetRoutingModel(
            self.mixer, task, width=self.width, head_dim=self.head_dim, vc_dim=self.vc_dim
        )


@dataclass(frozen=True)
class ModelConfig:
    """A sequence model: see `SequenceModel` for the fields.

    `options` are the mixer's own, by the names of `smat.models.mixers`.
    """

    mixer: str
    width: int
    num_layers: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    learned_positions: bool = False
    conv_size: int = 0
    mlp_ratio: float = 0.0
    norm: str = "rms"
    tied: bool = False

    def build(self, task: Any) -> nn.Module:
        """Return the model for a task."""
        return SequenceModel(self, task)


def build_model(config: ModelConfig | RoutingModelConfig, task: Any) -> nn.Module:
    """Return the model that a configuration describes, for a task."""
    return config.build(task)
