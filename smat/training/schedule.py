"""The learning rate of a step: warmup, then constant or a cosine to a fraction of the peak."""

from __future__ import annotations

import math

from smat.training.config import TrainingConfig


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of a step, counted from 0.

    >>> config = TrainingConfig(10, 1, 1.0, schedule="cosine", warmup_steps=2, final_fraction=0.5)
    >>> [round(learning_rate(step, config), 3) for step in (0, 1, 2, 5, 9)]
    [0.5, 1.0, 1.0, 0.806, 0.5]

    The first step of the warmup already moves, the last one is at the peak, and so is the first
    step of the cosine; the last step is at `final_fraction` of the peak. A function of the step
    alone, so a resumed run has nothing to restore.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    length = config.steps - 1 - config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / length) if length > 0 else 1.0
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * cosine)
