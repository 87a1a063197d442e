"""Tasks of the paper: examples, the rows that count, losses and metrics."""

from smat.tasks.joint_recall import JointRecall
from smat.tasks.language_modelling import LanguageModelling
from smat.tasks.length_recall import LengthRecall
from smat.tasks.mqar import MQAR
from smat.tasks.multi_key_recall import MultiKeyRecall
from smat.tasks.subset_routing import SubsetRouting
from smat.tasks.task import Task

__all__ = [
    "MQAR",
    "JointRecall",
    "LanguageModelling",
    "LengthRecall",
    "MultiKeyRecall",
    "SubsetRouting",
    "Task",
]
