"""Training on Lightning Fabric: resumable, with the paper's schedules and parameter groups."""

from smat.training.checkpoint import CheckpointError, DiskFullError, load_weights
from smat.training.loop import Interrupted, train
from smat.training.recipe import TrainingConfig
from smat.training.trainer import Evaluation, NonFiniteLossError, Progress, evaluate

__all__ = [
    "CheckpointError",
    "DiskFullError",
    "Evaluation",
    "Interrupted",
    "NonFiniteLossError",
    "Progress",
    "TrainingConfig",
    "evaluate",
    "load_weights",
    "train",
]
