"""A number of a table: a mean, its deviation over seeds, and how both are printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from statistics import fmean, stdev

PERCENT_DECIMALS = 1
LOSS_DECIMALS = 3
LOSS_WORDS = ("loss", "nats")


@dataclass(frozen=True)
class Value:
    """A mean and, if there are several seeds, their sample standard deviation.

    >>> mean_of({0: 1.0, 1: 2.0, 2: 6.0})
    Value(mean=3.0, std=2.6457513110645907, by_seed={0: 1.0, 1: 2.0, 2: 6.0})
    """

    mean: float
    std: float | None = None
    by_seed: Mapping[int, float] | None = None

    @property
    def num_seeds(self) -> int:
        return len(self.by_seed or ())


def mean_of(by_seed: Mapping[int, float]) -> Value:
    """Summarise one number a seed."""
    numbers = list(by_seed.values())
    return Value(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None, dict(by_seed))


def is_loss(name: str) -> bool:
    """Tell a control that is a loss from one that is an accuracy in per cent, by its name.

    >>> is_loss("constant predictor, nats"), is_loss("certified ceiling")
    (True, False)
    """
    return any(word in name.lower() for word in LOSS_WORDS)


def decimals_of(name: str) -> int:
    """Return how many decimals a row has: accuracies one, losses three."""
    return LOSS_DECIMALS if is_loss(name) else PERCENT_DECIMALS


def format_value(value: Value, decimals: int = PERCENT_DECIMALS) -> str:
    """Write a mean, and the deviation where there is one.

    >>> format_value(Value(98.25, 0.4)), format_value(Value(98.25))
    ('98.3 ± 0.4', '98.3')
    """
    mean = format_number(value.mean, decimals)
    return mean if value.std is None else f"{mean} ± {format_number(value.std, decimals)}"


def format_number(number: float, decimals: int) -> str:
    """Write a number with so many decimals, and never a minus before a zero.

    >>> format_number(-0.001, 1), format_number(1.0, 3), format_number(46.55, 1)
    ('0.0', '1.000', '46.6')

    What is rounded are the digits that Python prints: the 46.55 of a paper becomes 46.6, although
    the nearest binary fraction lies below it.
    """
    digits = Decimal(repr(float(number))).quantize(Decimal(1).scaleb(-decimals), ROUND_HALF_UP)
    return f"{digits if digits else abs(digits):f}"
