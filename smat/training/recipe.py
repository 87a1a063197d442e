"""How a model is trained: every number that changes its weights, its optimiser and its rate."""

from __future__ import annotations

import math
from typing import Any, Literal

import pydantic
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import nn

# Parameters of a recurrence's dynamics, which the paper leaves out whatever their shape.
NEVER_DECAYED = {"A_log", "dt_bias", "D"}


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
    decay: Literal["matrices", "all"] = "matrices"  # matrices: see `parameter_groups`
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: NonNegativeInt = 0  # rising linearly, before either schedule
    final_fraction: NonNegativeFloat = 0.1  # where the cosine ends, as a fraction of the peak
    clip: PositiveFloat | None = 1.0  # the largest norm of the gradient; None: no limit
    precision: Literal["32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"] = "32-true"
    eval_every: NonNegativeInt = 0  # steps between validations; 0: none before the end
    balance_weight: NonNegativeFloat = 0.0  # of the model's balance loss, at the start
    balance_anneal: NonNegativeInt = 1000  # steps over which it falls to 0; 0: it stays
    accumulate: PositiveInt = 1  # parts of a device's batch whose gradients are added up
    checkpoint_seconds: NonNegativeFloat = 60.0  # between checkpoints; it changes no weight

    def changed(self, **changes: Any) -> TrainingConfig:
        """Return the recipe with other values in some fields, checked as a new one is."""
        return TrainingConfig(**dict(self) | changes)

    @pydantic.model_validator(mode="after")
    def _check_warmup(self) -> TrainingConfig:
        if self.warmup_steps > self.steps:
            raise ValueError(f"{self.warmup_steps} warmup steps do not fit in {self.steps} steps")
        return self


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.Optimizer:
    """Build the optimiser over the model's parameter groups; one kernel updates all of them."""
    groups = parameter_groups(model, config)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no parameter to train")
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    # A fused step takes a fifth of the time of one tensor after another, on a CPU too.
    return kinds[config.optimizer](groups, lr=config.learning_rate, fused=True)


def parameter_groups(model: nn.Module, config: TrainingConfig) -> list[dict[str, Any]]:
    """Split what is trained into a group that decays and one that does not.

    >>> config = TrainingConfig(steps=1, batch_size=1, learning_rate=1e-3, weight_decay=0.1)
    >>> [(g["weight_decay"], len(g["params"])) for g in parameter_groups(nn.Linear(2, 2), config)]
    [(0.1, 1), (0.0, 1)]

    "matrices" leaves out biases, norms, A_log, dt_bias, D, and what a layer has marked by
    `keep_from_decay_`: a gain that has the shape of a matrix would shrink to nothing.
    """
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decays = config.decay == "all" or _is_matrix(model, name, parameter)
            (decayed if decays else kept).append(parameter)
    groups = [(decayed, config.weight_decay), (kept, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Return the learning rate of a step, counted from 0.

    >>> config = TrainingConfig(steps=10, batch_size=1, learning_rate=1.0, schedule="cosine",
    ...                         warmup_steps=2, final_fraction=0.5)
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


def _is_matrix(model: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Tell a matrix from a bias, the weight of a norm, and what is kept from decay."""
    if getattr(parameter, "_no_weight_decay", False):
        return False
    owner, _, leaf = name.rpartition(".")
    is_norm = "norm" in type(model.get_submodule(owner)).__name__.lower()
    return parameter.ndim >= 2 and leaf not in NEVER_DECAYED and "bias" not in leaf and not is_norm
