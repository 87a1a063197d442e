"""Training on Lightning Fabric: resumable, with the paper's schedules and parameter groups."""

from smat.training.checkpoint import CheckpointError, DiskFullError, load_weights
from smat.training.config import TrainingConfig
from smat.training.evaluation import Evaluation, evaluate
from smat.training.loop import train
from smat.training.progress import Interrupted, NonFiniteLossError, Progress

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
