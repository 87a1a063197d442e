"""Stop a run whose loss is no number any more, and say what to look at."""

from __future__ import annotations

import math

from torch import Tensor, nn


class NonFiniteLossError(ArithmeticError):
    """The loss became infinite or not a number."""


def largest_gradient(model: nn.Module) -> tuple[str, float] | None:
    """Name the parameter with the largest entry in its gradient; one that is no number wins.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> (3 * layer.weight[0, 0]).backward()
    >>> largest_gradient(layer)
    ('weight', 3.0)
    """
    found = {
        name: parameter.grad.abs().max().item()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.numel()
    }
    if not found:
        return None
    return max(found.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def non_finite_loss(
    loss: float,
    *,
    step: int,
    learning_rate: float,
    model: nn.Module,
    clip: float | None = None,
    gradient_norm: Tensor | None = None,
) -> NonFiniteLossError:
    """Say at which step and learning rate it happened, and how large the gradient had become.

    The gradients are those that the model still holds: of the step before, where the loss was
    still finite, and scaled back to what they were before clipping to `clip`.
    """
    message = f"the loss is {loss} at step {step} (learning rate {learning_rate:.3g})"
    worst = largest_gradient(model)
    if worst is None:
        return NonFiniteLossError(f"{message}, before any gradient: the model or its input is off")
    name, value = worst
    norm = math.nan if gradient_norm is None else gradient_norm.item()
    if clip is not None and math.isfinite(norm) and norm > clip:
        value *= norm / clip
    return NonFiniteLossError(
        f"{message}; the largest gradient of the last step was {value:.3g}, in {name}; "
        "try a lower learning rate, a longer warmup or a smaller clip"
    )
