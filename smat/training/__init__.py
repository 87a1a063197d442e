"""Training on Lightning Fabric: resumable, with the paper's schedules and parameter groups."""

from smat.training.checkpoint import CheckpointError, load_weights
from smat.training.config import TrainingConfig
from smat.training.evaluation import Evaluation, evaluate
from smat.training.files import DiskFullError
from smat.training.finite import NonFiniteLossError
from smat.training.loop import train
from smat.training.progress import Interrupted, Progress

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
