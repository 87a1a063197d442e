"""Draw learning curves: accuracy and loss against the step, a panel a cell and a line an arm."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean
from typing import NamedTuple

from smat.report.curve_axes import LEFT, RIGHT, WIDTH, Scale, frame
from smat.report.experiments_data import Record
from smat.report.experiments_value import is_loss

DASHES = ("", "5 3", "1.5 2.5", "8 3 1.5 3", "3 1.5")
BASELINES = ("softmax", "mamba2", "deltanet", "gated_deltanet", "log_linear")
NUM_OTHERS = 6

Points = list[tuple[float, float]]
Axis = Callable[[float], float]


@dataclass(frozen=True)
class LineStyle:
    """How the line of an arm looks everywhere: a colour of the style sheet, dashes, emphasis."""

    number: int
    colour: str
    dash: str
    strong: bool

    @property
    def attributes(self) -> str:
        """The attributes of an SVG element that draws the line."""
        dash = f' stroke-dasharray="{self.dash}"' if self.dash else ""
        kind = "line strong" if self.strong else "line"
        return f'class="{kind} arm-{self.number}" style="--line:var(--{self.colour})"{dash}'


class Band(NamedTuple):
    """A curve over seeds: the mean, and from the lowest to the highest."""

    mean: Points
    low: Points
    high: Points


def line_styles(arms: Iterable[str]) -> dict[str, LineStyle]:
    """Give every arm its own look.

    >>> styles = line_styles(["mamba2", "mamba2_smat_d3", "smat_d3"])
    >>> [(style.colour, style.dash) for style in styles.values()]
    [('mamba2', '5 3'), ('d3', ''), ('d3', '5 3')]

    The colour says which mask or model, dashes tell arms of one colour apart and baselines from
    masks, and the style sheet takes its colours from those that the colour-blind can tell apart.
    """
    styles: dict[str, LineStyle] = {}
    taken: dict[str, list[str]] = {}
    num_others = 0
    for number, arm in enumerate(arms):
        match = re.search(r"smat_d([1-4])", arm)
        colour = f"d{match[1]}" if match else _baseline(arm)
        if not colour:
            colour = f"other{num_others % NUM_OTHERS}"
            num_others += 1
        first = BASELINES.index(arm) if arm in BASELINES else 0
        rotated = [*DASHES[first:], *DASHES[:first]]
        used = taken.setdefault(colour, [])
        dash = next((dash for dash in rotated if dash not in used), rotated[0])
        used.append(dash)
        styles[arm] = LineStyle(number, colour, dash, bool(match))
    return styles


def _baseline(arm: str) -> str:
    """Find the model that an arm is or varies: `mamba2_log_linear` is drawn as log-linear."""
    ends = [name for name in BASELINES if arm.endswith(name)]
    starts = [name for name in BASELINES if arm.startswith(f"{name}_")]
    return max(ends or starts, key=len, default="")


def over_seeds(records: Sequence[Record], column: int) -> Band:
    """Join the curves of several seeds at the steps where every one has a number."""
    found: dict[float, list[float]] = {}
    for record in records:
        for point in record.get("curve", []):
            if point[column] is not None:
                found.setdefault(point[0], []).append(point[column])
    full = max(map(len, found.values()), default=0)
    steps = sorted(step for step, values in found.items() if len(values) == full)
    return Band(*([(s, join(found[s])) for s in steps] for join in (fmean, min, max)))


def panel(
    records: Sequence[Record], styles: Mapping[str, LineStyle], scale: Scale, title: str = ""
) -> str:
    """Draw one cell of a table as SVG: accuracy above, training loss below."""
    parts = [frame(scale)]
    if title:
        parts.append(f'<text class="title" x="{LEFT}" y="{scale.top + 10}">{escape(title)}</text>')
    for name, level in _levels(records).items():
        y = scale.loss(level)
        parts.append(
            f'<g class="level"><title>{escape(name)}: {level:.3f}</title>'
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/></g>'
        )
    # The strong lines last: they lie on top of the others.
    for arm in sorted(styles, key=lambda arm: styles[arm].strong):
        same = [record for record in records if record["run"]["arm"] == arm]
        if same:
            parts.append(f"<g {styles[arm].attributes}><title>{escape(arm)}</title>")
            if scale.evaluated:
                parts.append(_line(over_seeds(same, 2), scale.x, scale.accuracy))
            parts += [_line(over_seeds(same, 1), scale.x, scale.loss), "</g>"]
    label = escape(f"Learning curves, {title}" if title else "Learning curves")
    return (
        f'<svg class="panel" viewBox="0 {scale.top} {WIDTH} {scale.height}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def _levels(records: Iterable[Record]) -> dict[str, float]:
    """The losses among the controls: where a model stays that has learned nothing."""
    levels: dict[str, float] = {}
    for record in records:
        levels.update({n: v for n, v in record.get("controls", {}).items() if is_loss(n)})
    return levels


def _line(band: Band, x: Axis, y: Axis) -> str:
    if not band.mean:
        return ""
    parts = []
    if band.low != band.high:
        edge = [*band.low, *reversed(band.high)]
        parts.append(f'<path class="band" d="{_path(edge, x, y)}Z"/>')
    parts.append(f'<path d="{_path(band.mean, x, y)}"/>')
    if len(band.mean) == 1:
        step, value = band.mean[0]
        parts.append(f'<circle cx="{x(step):.1f}" cy="{y(value):.1f}" r="2.5"/>')
    return "".join(parts)


def _path(points: Points, x: Axis, y: Axis) -> str:
    return "M" + "L".join(f"{x(step):.1f} {y(value):.1f}" for step, value in points)
