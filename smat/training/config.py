"""How a model is trained: every number that changes its weights, in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class TrainingConfig:
    """A training recipe.

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
        final_fraction: Where the cosine ends, as a part of the peak.
        clip: The largest norm of the gradient, None for no limit.
        precision: A precision of Lightning Fabric, such as "32-true" or "bf16-mixed".
        eval_every: Steps between evaluations on the validation split; 0: none before the end.
        balance_weight: The weight of the model's balance loss at the start.
        balance_anneal: Steps over which that weight falls to 0; 0: it stays.
        checkpoint_seconds: Seconds between checkpoints. It changes no weight.
    """

    steps: int
    batch_size: int
    learning_rate: float
    optimizer: Literal["adam", "adamw"] = "adam"
    weight_decay: float = 0.0
    decay: Literal["matrices", "all"] = "matrices"
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.1
    clip: float | None = 1.0
    precision: str = "32-true"
    eval_every: int = 0
    balance_weight: float = 0.0
    balance_anneal: int = 1000
    checkpoint_seconds: float = field(default=60.0, metadata={"changes_nothing": True})

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                known = ", ".join(choices)
                raise ValueError(f"{name} is one of {known}, not {getattr(self, name)!r}")
        for name in ("steps", "batch_size", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0, or None for no clipping, got {self.clip}")
        if self.warmup_steps > self.steps:
            raise ValueError(f"{self.warmup_steps} warmup steps do not fit in {self.steps} steps")


CHOICES = {
    "optimizer": ("adam", "adamw"),
    "decay": ("matrices", "all"),
    "schedule": ("constant", "cosine"),
    "precision": PRECISIONS,
}
NOT_NEGATIVE = (
    "weight_decay", "warmup_steps", "final_fraction", "eval_every", "balance_weight",
    "balance_anneal", "checkpoint_seconds",
)  # fmt: skip
