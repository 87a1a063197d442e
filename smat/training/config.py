"""How a model is trained: every number that changes its weights, in one frozen record."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class TrainingConfig(pydantic.BaseModel):
    """A training recipe; an unknown field or a number that cannot be raises a ValueError.

    >>> TrainingConfig(steps=1500, batch_size=64, learning_rate=3e-3).schedule
    'constant'
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    steps: PositiveInt
    batch_size: PositiveInt  # examples a step, over all devices
    learning_rate: PositiveFloat  # the peak
    optimizer: Literal["adam", "adamw"] = "adam"  # decay in the gradient, or decoupled
    weight_decay: NonNegativeFloat = 0.0
    decay: Literal["matrices", "all"] = "matrices"  # matrices: no bias, norm, A_log, dt_bias, D
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0  # rising linearly, before either schedule
    final_fraction: NonNegativeFloat = 0.1  # where the cosine ends, as a fraction of the peak
    clip: PositiveFloat | None = 1.0  # the largest norm of the gradient; None: no limit
    precision: Literal["32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"] = "32-true"
    eval_every: NonNegativeInt = 0  # steps between validations; 0: none before the end
    balance_weight: NonNegativeFloat = 0.0  # of the model's balance loss, at the start
    balance_anneal: NonNegativeInt = 1000  # steps over which it falls to 0; 0: it stays
    checkpoint_seconds: NonNegativeFloat = 60.0  # between checkpoints; it changes no weight

    def changed(self, **changes: Any) -> TrainingConfig:
        """Return the recipe with other values in some fields, checked as a new one is."""
        return TrainingConfig(**dict(self) | changes)

    @pydantic.model_validator(mode="after")
    def _check_warmup(self) -> TrainingConfig:
        if self.warmup_steps > self.steps:
            raise ValueError(f"{self.warmup_steps} warmup steps do not fit in {self.steps} steps")
        return self
