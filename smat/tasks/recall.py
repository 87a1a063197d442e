"""What recall tasks share: the loss and the metric of one right token a query."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from smat.tasks.task import Batch

SPLITS = ("validation", "test")


def cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    """Return the cross-entropy of logits (B, R, vocab), averaged over all queries."""
    return functional.cross_entropy(outputs.flatten(0, 1).float(), batch.targets.flatten())


def fraction_right(outputs: Tensor, batch: Batch) -> Tensor:
    """Return the fraction (B,) of an example's queries whose largest logit is the target."""
    return (outputs.argmax(-1) == batch.targets).float().mean(-1)


def check_split(split: str) -> None:
    """Refuse a split that is not held out: its seed might be that of training."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, but it is {split!r}")
