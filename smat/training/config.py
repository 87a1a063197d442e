"""How a model is trained: every number that changes its weights, in one frozen record."""

from __future__ import annotations

from typing import Literal

import pydantic
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class TrainingConfig(pydantic.BaseModel):
    """A training recipe; an unknown field or a number that cannot be raises a ValueError.

    >>> TrainingConfig(steps=1500, batch_size=64, learning_rate=3e-3).schedule
    'constant'

    Attributes:
        steps: Optimiser steps.
        batch_size: Examples a step, over all devices.
        learning_rate: The peak.
        optimizer: "adam" (weight decay is part of the gradient) or "adamw" (decoupled).
        weight_decay: Its strength.
        decay: What decays: "matrices" (no bias, norm, A_log, dt_bias, D) or "all".
        schedule: "constant", or "cosine" from the peak down to `final_fraction` of it.
        warmup_steps: Steps of linear warmup before either.
        final_fraction: Where the cosine ends, as a fraction of the peak.
        clip: The largest norm of the gradient, None for no limit.
        precision: A precision of Lightning Fabric.
        eval_every: Steps between evaluations on the validation split; 0: none before the end.
        balance_weight: The weight of the model's balance loss at the start.
        balance_anneal: Steps over which that weight falls to 0; 0: it stays.
        checkpoint_seconds: Seconds between checkpoints. It changes no weight.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    steps: PositiveInt
    batch_size: PositiveInt
    learning_rate: PositiveFloat
    optimizer: Literal["adam", "adamw"] = "adam"
    weight_decay: NonNegativeFloat = 0.0
    decay: Literal["matrices", "all"] = "matrices"
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0
    final_fraction: NonNegativeFloat = 0.1
    clip: PositiveFloat | None = 1.0
    precision: Literal["32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"] = "32-true"
    eval_every: NonNegativeInt = 0
    balance_weight: NonNegativeFloat = 0.0
    balance_anneal: NonNegativeInt = 1000
    checkpoint_seconds: NonNegativeFloat = 60.0

    @pydantic.model_validator(mode="after")
    def _check_warmup(self) -> TrainingConfig:
        if self.warmup_steps > self.steps:
            raise ValueError(f"{self.warmup_steps} warmup steps do not fit in {self.steps} steps")
        return self
