"""The paper's tables as runs that can be made, interrupted and resumed."""

from smat.experiments.records import Store
from smat.experiments.run import Experiment, Run

__all__ = ["Experiment", "Run", "Store"]
