"""The paper's metric of a model on held-out examples, load by load."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from smat.tasks.task import Task


@dataclass(frozen=True)
class Evaluation:
    """What a model reaches, accuracies in %."""

    accuracy: float  # the mean over cells of each cell's mean score
    by_cell: dict[str, float]  # the mean score of each load
    loss: float  # the mean over examples


@torch.no_grad()
def evaluate(
    model: nn.Module,
    task: Task,
    *,
    seed: int,
    split: str = "test",
    device: torch.device | str = "cpu",
) -> Evaluation:
    """Score a model on a split; the model is in evaluation mode meanwhile."""
    scores: dict[str, list[Tensor]] = defaultdict(list)
    losses: list[Tensor] = []
    num_examples = 0
    was_training = model.training
    model.eval()
    try:
        for batch in task.eval_batches(seed, split):
            batch = batch.to(device)
            outputs = model(rows=batch.rows, **batch.inputs).float()
            scores[batch.cell].append(task.score(outputs, batch).double().flatten())
            losses.append(task.loss(outputs, batch).double() * len(batch.rows))
            num_examples += len(batch.rows)
    finally:
        model.train(was_training)
    if not losses:
        raise ValueError(f"task {task.name} has no examples in split {split!r}")
    by_cell = {cell: 100 * torch.cat(found).mean().item() for cell, found in scores.items()}
    loss = torch.stack(losses).sum().item() / num_examples
    return Evaluation(sum(by_cell.values()) / len(by_cell), by_cell, loss)
