"""The paper's tables as runs that can be made, interrupted and resumed."""

from smat.experiments.run import Arm, Experiment, Run
from smat.experiments.store import Store

__all__ = ["Arm", "Experiment", "Run", "Store"]
