"""Judge a result before it is timed: no speed is reported on a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCES = {
    torch.float64: (1e-12, 1e-10),
    torch.float32: (1e-5, 1e-4),
    torch.bfloat16: (5e-3, 1e-2),
    torch.float16: (5e-3, 1e-2),
}  # of an output and of a gradient, relative RMS


class CheckFailedError(ValueError):
    """What was to be timed gives wrong numbers."""


@dataclass(frozen=True)
class Check:
    """One comparison with an oracle in fp64."""

    name: str
    quantity: str
    size: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


def relative_rms(value: Tensor, oracle: Tensor) -> float:
    """The root mean square of the difference, relative to the oracle's.

    >>> relative_rms(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0]))
    0.08...
    """
    value, oracle = value.detach().double(), oracle.detach().double()
    return float((value - oracle).norm() / oracle.norm().clamp_min(1e-300))


def require_passed(checks: Sequence[Check]) -> None:
    """Refuse to go on unless every check passed."""
    for check in checks:
        if not check.passed:
            raise CheckFailedError(
                f"{check.name}: the {check.quantity} at {check.size} is off by {check.error:.1e} "
                f"relative RMS, more than {check.tolerance:.0e}; nothing was timed"
            )
