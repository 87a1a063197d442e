"""The axes of learning curves: shared by the panels of a table, with few and round ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from smat.report.experiments_data import Record

WIDTH, HEIGHT = 320, 252
LEFT, RIGHT = 38, 312
ACCURACY, LOSS = (20, 112), (140, 226)  # from the top of a plot to its bottom
MOST_TICKS = 4
SMALLEST = 1e-4  # of the largest loss: what is smaller lies on the lower edge
LOG_FROM = 12.0  # losses that span a larger ratio are drawn on a logarithmic scale


@dataclass(frozen=True)
class Scale:
    """The axes that the panels of one table share; without evaluations on the way, loss alone."""

    last_step: float
    low_loss: float
    high_loss: float
    log: bool
    evaluated: bool = True

    @property
    def top(self) -> int:
        """Where a panel begins: it leaves out the plot of accuracies that would hold one point."""
        return 0 if self.evaluated else LOSS[0] - ACCURACY[0]

    @property
    def height(self) -> int:
        return HEIGHT - self.top

    def x(self, step: float) -> float:
        return LEFT + (RIGHT - LEFT) * step / self.last_step

    def accuracy(self, value: float) -> float:
        top, bottom = ACCURACY
        return bottom - (bottom - top) * min(max(value, 0.0), 100.0) / 100

    def loss(self, value: float) -> float:
        top, bottom = LOSS
        low, high, value = (self._loss(x) for x in (self.low_loss, self.high_loss, value))
        part = (value - low) / (high - low) if high > low else 0.5
        return bottom - (bottom - top) * min(max(part, 0.0), 1.0)

    def _loss(self, value: float) -> float:
        return math.log(max(value, self.low_loss)) if self.log else value


def scale_of(records: Iterable[Record]) -> Scale | None:
    """Find axes that hold the curves of all records; None if there is nothing to draw."""
    curves = [record.get("curve", []) for record in records]
    points = [point for curve in curves for point in curve]
    losses = sorted(point[1] for point in points if point[1] is not None)
    if not losses or max(point[0] for point in points) <= 0:
        return None
    low, high = losses[0], losses[-1]
    positive = next((loss for loss in losses if loss > 0), 0.0)
    low_log = max(positive, high * SMALLEST)
    log = low >= 0 and high > 0 and high / low_log > LOG_FROM
    if log:
        low = low_log
    else:
        low, high = min(low, 0.0), high
    evaluated = any(sum(point[2] is not None for point in curve) > 1 for curve in curves)
    return Scale(max(point[0] for point in points), low, high, log, evaluated)


def frame(scale: Scale) -> str:
    """Draw the axes: few ticks, thin rules, the quantity over its own plot."""
    parts = []
    for accuracy in (0, 50, 100) if scale.evaluated else ():
        parts.append(_rule(scale.accuracy(accuracy), str(accuracy)))
    for loss in loss_ticks(scale):
        parts.append(_rule(scale.loss(loss), format_loss(loss)))
    for step in step_ticks(scale.last_step):
        anchor = "end" if scale.x(step) > RIGHT - 12 else "middle"
        x = RIGHT if anchor == "end" else scale.x(step)
        place = f'x="{x:.1f}" y="{LOSS[1] + 14}" text-anchor="{anchor}"'
        parts.append(f"<text {place}>{format_step(step)}</text>")
    name = "loss, log scale" if scale.log else "loss"
    if scale.evaluated:
        parts.append(f'<text class="name" x="{RIGHT}" y="{ACCURACY[0] - 6}">accuracy, %</text>')
    parts.append(f'<text class="name" x="{RIGHT}" y="{LOSS[0] - 6}">{name}</text>')
    return f'<g class="frame">{"".join(parts)}</g>'


def _rule(y: float, text: str) -> str:
    return (
        f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>'
    )


def loss_ticks(scale: Scale) -> list[float]:
    """Choose round values for the axis of the loss.

    >>> loss_ticks(Scale(100, 0.0, 0.7, log=False)), loss_ticks(Scale(100, 0.004, 0.6, log=True))
    ([0.0, 0.2, 0.4, 0.6], [0.01, 0.1])
    """
    low, high = scale.low_loss, scale.high_loss
    if scale.log:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        fine = [float(f"{digit}e{power}") for power in powers for digit in (1, 2, 5)]
        fine = [tick for tick in fine if low <= tick <= high]
        coarse = [tick for tick in fine if f"{tick:e}".startswith("1")]
        return fine if len(fine) <= MOST_TICKS else coarse[:: math.ceil(len(coarse) / MOST_TICKS)]
    step = round_step((high - low) / 3)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def format_loss(loss: float) -> str:
    """Write a loss shortly enough for the margin.

    >>> [format_loss(loss) for loss in (0, 0.25, 0.001, 0.0001, 10)]
    ['0', '0.25', '0.001', '1e-4', '10']
    """
    return f"{loss:g}" if loss == 0 or loss >= 0.001 else f"{loss:.0e}".replace("e-0", "e-")


def step_ticks(last: float) -> list[float]:
    """Choose round steps from 0 to the last.

    >>> step_ticks(1500), step_ticks(300)
    ([0.0, 500.0, 1000.0, 1500.0], [0.0, 100.0, 200.0, 300.0])
    """
    step = round_step(last / 3)
    return [i * step for i in range(math.floor(last / step + 1e-9) + 1)]


def round_step(size: float) -> float:
    """Return 1, 2 or 5 times a power of ten, near a size.

    >>> [round_step(size) for size in (0.23, 500, 66)]
    [0.2, 500.0, 50.0]
    """
    if size <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(size))
    return min((power * m for m in (1, 2, 5, 10)), key=lambda step: abs(step - size))


def format_step(step: float) -> str:
    """Write a step.

    >>> [format_step(step) for step in (0, 500, 1500, 12000)]
    ['0', '500', '1.5k', '12k']
    """
    return f"{step:g}" if step < 1000 else f"{step / 1000:g}k"
