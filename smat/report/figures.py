"""Draw every figure: masks (Figure 1 and the stepped window), learning curves, benchmarks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from io import StringIO
from itertools import cycle, product
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smat.extras import require
from smat.masks import boundary
from smat.masks.mask import SMatMask, SMatWarning
from smat.report.records import PER_CENT, Record, is_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series

MAX_SEQ_LEN = 4096  # a figure holds T x T cells, and no screen shows more
FUTURE, UNSEEN, CAUSAL, LONG_RANGE, LONG_RANGE_NEXT = range(5)
MASK_COLOURS = ("#ffffff00", "#8d8d8d33", "#4a7fb5", "#d1495b", "#e59500")
MASK_LEGEND = {CAUSAL: "causal", LONG_RANGE: "long range: on the hyperplane"}
MASK_LEGEND |= {LONG_RANGE_NEXT: "the same, next direction", UNSEEN: "zero: off the hyperplane"}
INK, GREY = "#2b2d42", "#8d8d8d"
COLOURS = ("#4a7fb5", "#2a9d8f", "#e59500", "#d1495b", "#8a63c9", GREY, "#c0609b", "#7c9a2c")
LINES = ("-", "--", ":", "-.")
Looks = dict[str, dict[str, Any]]  # keywords of a line, by arm
STYLE = {
    "font.size": 9, "axes.titlesize": 10, "legend.fontsize": 9, "legend.frameon": False,
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.linewidth": 0.8,
    "xtick.color": INK, "ytick.color": INK, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "lines.linewidth": 1.3, "lines.markersize": 3.5, "savefig.dpi": 150,
    "svg.fonttype": "none", "svg.hashsalt": "smat",
}  # fmt: skip
DARK = "@media (prefers-color-scheme: dark) { svg { color: #e7e9ef; } }"
LOG_FROM = 12.0  # losses that span a larger ratio are drawn on a logarithmic scale
SEED_LINE: dict[str, Any] = {"linewidth": 0.6, "alpha": 0.5}
SMALLEST = 1e-4  # of the largest loss: what is smaller lies on the lower edge
ACCURACY_AXIS = {"ylim": (-4, 104), "yticks": [0, 50, 100], "ylabel": "accuracy, %"}


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure; the file's suffix chooses the format."""
    if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        raise ValueError(f"cannot tell the format of {path.name!r}: use .png, .svg or .pdf")
    path.parent.mkdir(parents=True, exist_ok=True)
    with with_style():
        figure.savefig(path, facecolor="white")
    return path


def figure_svg(figure: Figure) -> str:
    """Write a figure as SVG whose ink is dark on a light screen and light on a dark one."""
    text = StringIO()
    with with_style():
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue().replace(INK, "currentColor")
    style = f"<style>svg {{ color: {INK}; }} {DARK}</style>"
    return re.sub(r"<svg [^>]*>", rf"\g<0>{style}", svg, count=1)


def classify(mask: SMatMask) -> Tensor:
    """Say what each entry of a mask is, as `(T, T)` codes of this module.

    >>> classify(SMatMask(seq_len=4, vc_dim=1, chunk_size=1))
    tensor([[2, 0, 0, 0],
            [2, 2, 0, 0],
            [3, 3, 2, 0],
            [3, 3, 2, 2]], dtype=torch.uint8)

    Long-range entries alternate between two codes from one direction to the next, so that the
    parallel hyperplanes of a direction stand out as a band.
    """
    position = torch.arange(mask.seq_len)
    visible = mask.dense()
    distant = visible & (position < mask.boundaries()[:, None])
    odd_direction = mask.query_type(position) // mask.geometry.field_size % 2 == 1
    kind = torch.full(visible.shape, UNSEEN, dtype=torch.uint8).tril()
    kind[visible] = CAUSAL
    kind[distant] = LONG_RANGE
    kind[distant & odd_direction[:, None]] = LONG_RANGE_NEXT
    return kind


def example_masks() -> list[SMatMask]:
    """Return the masks that a report shows: d = 1..4, and the stepped window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SMatWarning)  # a title says where d is guaranteed
        fixed = [SMatMask(128, vc_dim, chunk_size=16) for vc_dim in (1, 2, 3, 4)]
        return [*fixed, SMatMask(96, 3, chunk_size=16, boundary=boundary.window(16))]


def mask_figure(masks: Sequence[SMatMask]) -> Figure:
    """Lay masks out side by side, one panel each, over one legend."""
    if not masks:
        raise ValueError("there is no mask to draw: give at least one")
    longest = max(mask.seq_len for mask in masks)
    if longest > MAX_SEQ_LEN:
        raise ValueError(f"seq_len {longest} is too long to draw: use {MAX_SEQ_LEN} or less")
    with with_style():
        from matplotlib.patches import Patch

        figure = new_figure(max(3.55 * len(masks) + 0.35, 5.4), 4.55)
        panels = figure.subplots(1, len(masks), squeeze=False)[0]
        kinds = set()
        for axes, mask in zip(panels, masks, strict=True):
            kinds.update(_draw_mask(axes, mask).unique().tolist())
        panels[0].set_ylabel("query t")
        handles = [
            Patch(facecolor=MASK_COLOURS[kind], edgecolor=INK, linewidth=0.5, label=label)
            for kind, label in MASK_LEGEND.items()
            if kind in kinds
        ]
        columns = 4 if len(masks) > 2 else 2
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def _draw_mask(axes: Axes, mask: SMatMask) -> Tensor:
    from matplotlib.colors import ListedColormap

    kind, colours = classify(mask), ListedColormap(MASK_COLOURS)
    axes.imshow(kind.numpy(), colours, vmin=0, vmax=len(MASK_COLOURS) - 1, interpolation="none")
    for start, stop, num_distant in mask.segments():
        if num_distant > 0:
            corner = [-0.5, num_distant - 0.5, num_distant - 0.5]
            axes.plot(corner, [start - 0.5, start - 0.5, stop - 0.5], color=INK, linewidth=0.9)
    ticks = sorted({0, mask.seq_len, 0 if mask.boundary.moves else mask.num_distant})
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks([tick - 0.5 for tick in ticks], [str(tick) for tick in ticks])
    axes.set_xlabel("key j")
    title = f"d = {mask.vc_dim}" + f", VC dimension {mask.vc_dim}" * mask.guarantees_vc_dim
    title += f", {mask.boundary.describe()}" * mask.boundary.moves
    geometry, plain = mask.geometry, mask.vc_dim == 1 or mask.num_distant == 0
    sizes = f"{geometry.num_profiles} points, {geometry.num_types} hyperplanes"
    sizes = "plain causal mask" if plain else f"q = {geometry.field_size}: {sizes}"
    axes.set_title(f"{title}\n{sizes}")
    return kind


def curves_figure(
    records: Sequence[Record], arms: Mapping[str, str], cells: Mapping[str, str]
) -> Figure | None:
    """Draw accuracy over loss against the step: a panel a cell, a line an arm, thin ones its seeds.

    Accuracy is left out where it was evaluated at the end alone. None if there is nothing to draw.
    """
    points = require("pandas", extra="cli").DataFrame(
        [(r.run.arm, r.run.cell, r.run.seed, *point) for r in records for point in r.curve],
        columns=["arm", "cell", "seed", "step", "loss", "accuracy"],
    )
    if not points["loss"].notna().any() or points["step"].max() <= 0:
        return None
    evaluated = points.groupby(["arm", "cell", "seed"])["accuracy"].count().max() > 1
    quantities = ["accuracy", "loss"] if evaluated else ["loss"]
    drawn, unit = set(points["cell"]), records[0].unit
    panels = [cell for cell in dict.fromkeys([*cells, *points["cell"]]) if cell in drawn]
    looks = line_looks({**arms, **{arm: arms.get(arm, arm) for arm in points["arm"]}})
    looks = {arm: look for arm, look in looks.items() if arm in set(points["arm"])}
    width = min(3, len(panels))
    height, legend_height = ceil(len(panels) / width), 0.2 * ceil(len(looks) / width) + 0.3
    with with_style():
        figure = new_figure(3.4 * width, (1.5 * len(quantities) + 0.4) * height + legend_height)
        places = figure.subfigures(height, width, squeeze=False).flat
        for place, cell in zip(places, panels, strict=False):
            stack = place.subplots(len(quantities), squeeze=False, sharex=True)[:, 0]
            for axes, quantity in zip(stack, quantities, strict=True):
                _draw_curves(axes, points[points["cell"] == cell], quantity, looks)
                if quantity == "accuracy":
                    axes.set(**ACCURACY_AXIS if unit == PER_CENT else {"ylabel": unit})
            title = cells.get(cell, cell) or "all"
            stack[0].set_title(title, loc="left", weight="bold", parse_math=False)
            _scale_losses(stack[-1], points["loss"].dropna())
            same = [record for record in records if record.run.cell == cell]
            for level in {x for r in same for name, x in r.controls.items() if is_loss(name)}:
                stack[-1].axhline(level, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
        handles, _ = stack[0].get_legend_handles_labels()
        legend = figure.legend(handles=handles, loc="outside upper left", ncols=width)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a label is no formula
    return figure


def line_looks(arms: Mapping[str, str]) -> Looks:
    """Give every arm a kind of line and a colour that no other has.

    >>> line_looks({"mamba2": "Mamba-2"})
    {'mamba2': {'label': 'Mamba-2', 'linestyle': '-', 'color': '#4a7fb5'}}
    """
    looks = cycle(product(LINES, COLOURS))
    return {
        arm: {"label": label, "linestyle": line, "color": colour}
        for (arm, label), (line, colour) in zip(arms.items(), looks, strict=False)
    }


def _draw_curves(axes: Axes, points: DataFrame, quantity: str, looks: Looks) -> None:
    for arm, look in looks.items():
        by_step = points[points["arm"] == arm].groupby("step")[quantity]
        curve = by_step.agg(["mean", "min", "max", "count"])
        # The seeds meet at the steps where every one has a number.
        curve = curve[(curve["count"] > 0) & (curve["count"] == curve["count"].max())]
        axes.plot(curve["mean"], marker="o" if len(curve) == 1 else None, **look)
        if (curve["min"] < curve["max"]).any():
            for _, seed in points[points["arm"] == arm].groupby("seed"):
                known = seed[seed[quantity].notna()]
                axes.plot(known["step"], known[quantity], color=look["color"], **SEED_LINE)
    quiet_axes(axes)
    axes.set_xlim(left=0)
    axes.set_xlabel("step" if quantity == "loss" else "")


def _scale_losses(axes: Axes, losses: Series) -> None:
    """Give the panels of a table one axis, logarithmic if the losses need it."""
    low, high = losses.min(), losses.max()
    lowest = max(losses[losses > 0].min(), SMALLEST * high)
    if low >= 0 and high > LOG_FROM * lowest:
        axes.set(yscale="log", ylim=(0.9 * lowest, 1.2 * high), ylabel="loss, log scale")
    else:
        axes.set(ylim=(min(low, 0.0), high + 0.05 * abs(high)), ylabel="loss")


def bench_figure(result: Mapping[str, Any]) -> Figure:
    """Lay out one panel for the op, or one for each batch of decoding."""
    rows, config = result["rows"], result["config"]
    if not rows:
        raise ValueError("there is no row to draw: the benchmark timed nothing")
    decoding = result["benchmark"] == "decode"
    batches = sorted({row["batch"] for row in rows}) if decoding else [config["batch"]]
    what = "decoding" if decoding else "forward" + " + backward" * (result["benchmark"] == "train")
    sizes = "K = {key_dim}, V = {value_dim}, {dtype}".format_map(config)
    with with_style():
        figure = new_figure(4.6 * len(batches) + 1.8, 4.3)
        panels = figure.subplots(1, len(batches), squeeze=False)[0]
        for axes, batch in zip(panels, batches, strict=True):
            same = [row for row in rows if row["batch"] == batch] if decoding else rows
            _draw_times(axes, same, "context" if decoding else "seq_len")
            axes.set_title(f"{what}, {_heads(config['heads'])}, {sizes}, batch {batch}", fontsize=9)
            axes.set_xlabel("context, tokens" if decoding else "tokens T")
            axes.set_ylabel("milliseconds a token" if decoding else "milliseconds")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _draw_times(axes: Axes, rows: Sequence[Mapping[str, Any]], length: str) -> None:
    """Draw a line a variant: coloured by VC dimension, dashed with gates, dotted if it moves."""
    from matplotlib.ticker import LogLocator

    num_heads = max(row.get("heads", 1) for row in rows)
    for name in dict.fromkeys(row["name"] for row in rows):
        same = sorted((row for row in rows if row["name"] == name), key=lambda row: row[length])
        first, x = same[0], [row[length] for row in same]
        times = [
            [1e3 * row["timing"][field] for field in ("low", "median", "high")] for row in same
        ]
        low, middle, high = zip(*times, strict=True)
        heads = first.get("heads", num_heads)
        label = name if heads == num_heads else f"{name}, {_heads(heads)}"
        colour = GREY if first["vc_dim"] is None else COLOURS[(first["vc_dim"] - 1) % 5]
        line = LINES[bool(first.get("gated")) + 2 * (first.get("window_step") is not None)]
        axes.plot(x, middle, line, color=colour, marker="o", label=label)
        draw_band(axes, x, low, high, colour)
    quiet_axes(axes)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({row[length] for row in rows})
    axes.set_xticks(lengths, [f"{x // 1024}K" if x % 1024 == 0 else str(x) for x in lengths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()


def _heads(heads: int) -> str:
    return f"{heads} head{'s' * (heads != 1)}"


def draw_band(axes: Axes, x: Any, low: Any, high: Any, colour: str) -> None:
    axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def quiet_axes(axes: Axes) -> None:
    axes.grid(True)
    axes.spines[["top", "right"]].set_visible(False)


def with_style() -> AbstractContextManager[None]:
    return require("matplotlib", extra="cli").rc_context(STYLE)


def new_figure(width: float, height: float) -> Figure:
    return require("matplotlib.figure", extra="cli").Figure((width, height), layout="constrained")
