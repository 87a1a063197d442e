"""Draw every figure: masks (Figure 1 and the stepped window), learning curves, benchmarks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from io import StringIO
from itertools import cycle, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smat.extras import require
from smat.masks import boundary
from smat.masks.mask import SMatMask, SMatWarning
from smat.report.records import Record, is_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series

MAX_SEQ_LEN = 4096  # a figure holds T x T cells, and no screen shows more

FUTURE, UNSEEN, CAUSAL, LONG_RANGE, LONG_RANGE_NEXT = range(5)
MASK_COLOURS = ("#ffffff00", "#8d8d8d33", "#4a7fb5", "#d1495b", "#e59500")  # future: transparent
MASK_LEGEND = {
    CAUSAL: "causal",
    LONG_RANGE: "long range: on the hyperplane",
    LONG_RANGE_NEXT: "the same, next direction",
    UNSEEN: "zero: off the hyperplane",
}
INK = "#2b2d42"
COLOURS = (
    "#4a7fb5", "#2a9d8f", "#e59500", "#d1495b", "#8a63c9", "#8d8d8d", "#c0609b", "#7c9a2c",
)  # fmt: skip
LINES = ("-", "--", ":", "-.")
STYLE = {
    "font.size": 9, "axes.titlesize": 10, "legend.fontsize": 9, "legend.frameon": False,
    "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.linewidth": 0.8,
    "xtick.color": INK, "ytick.color": INK, "grid.alpha": 0.25, "grid.linewidth": 0.6,
    "lines.linewidth": 1.3, "lines.markersize": 3.5, "savefig.dpi": 150,
    "svg.fonttype": "none", "svg.hashsalt": "smat",
}  # fmt: skip
SCREENS = (
    f"<style>svg {{ color: {INK}; }}"
    "@media (prefers-color-scheme: dark) { svg { color: #e7e9ef; } }</style>"
)
LOG_FROM = 12.0  # losses that span a larger ratio are drawn on a logarithmic scale
SMALLEST = 1e-4  # of the largest loss: what is smaller lies on the lower edge


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
    distant = position[None, :] < mask.boundaries()[:, None]
    past = position[None, :] <= position[:, None]
    odd_direction = mask.query_type(position) // mask.geometry.field_size % 2 == 1
    kind = torch.full(visible.shape, FUTURE, dtype=torch.uint8)
    kind[past & ~visible] = UNSEEN
    kind[visible & ~distant] = CAUSAL
    kind[visible & distant] = LONG_RANGE
    kind[visible & distant & odd_direction[:, None]] = LONG_RANGE_NEXT
    return kind


def example_masks() -> list[SMatMask]:
    """Return the masks that a report shows: d = 1..4, and the stepped window."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SMatWarning)  # a title says where d is guaranteed
        fixed = [SMatMask(128, vc_dim, chunk_size=16) for vc_dim in (1, 2, 3, 4)]
        return [*fixed, SMatMask(96, 3, chunk_size=16, boundary=boundary.window(16))]


def mask_figure(masks: Sequence[SMatMask]) -> Figure:
    """Lay masks out in a line, one panel each, over one legend."""
    if not masks:
        raise ValueError("there is no mask to draw: give at least one")
    longest = max(mask.seq_len for mask in masks)
    if longest > MAX_SEQ_LEN:
        raise ValueError(
            f"seq_len {longest} is too long to draw cell by cell: use {MAX_SEQ_LEN} or less"
        )
    with _style():
        from matplotlib.patches import Patch

        figure = _figure(max(3.55 * len(masks) + 0.35, 5.4), 4.55)
        panels = figure.subplots(1, len(masks), squeeze=False)[0]
        for axes, mask in zip(panels, masks, strict=True):
            _draw_mask(axes, mask)
        panels[0].set_ylabel("query t")
        kinds = {kind for mask in masks for kind in classify(mask).unique().tolist()}
        handles = [
            Patch(facecolor=MASK_COLOURS[kind], edgecolor=INK, linewidth=0.5, label=label)
            for kind, label in MASK_LEGEND.items()
            if kind in kinds
        ]
        columns = 4 if len(masks) > 2 else 2
        figure.legend(handles=handles, loc="outside lower center", ncols=columns)
    return figure


def _draw_mask(axes: Axes, mask: SMatMask) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(MASK_COLOURS)
    codes = classify(mask).numpy()
    axes.imshow(codes, colours, vmin=0, vmax=len(MASK_COLOURS) - 1, interpolation="none")
    for start, stop, border in mask.segments():
        if border > 0:
            axes.plot([border - 0.5] * 2, [start - 0.5, stop - 0.5], color=INK, linewidth=1.1)
            axes.plot([-0.5, border - 0.5], [start - 0.5] * 2, color=INK, linewidth=0.6)
    ticks = sorted({0, mask.seq_len} | (set() if mask.boundary.moves else {mask.num_distant}))
    axes.set_xticks([tick - 0.5 for tick in ticks], map(str, ticks))
    axes.set_yticks([tick - 0.5 for tick in ticks], map(str, ticks))
    axes.set_xlabel("key j")
    title = f"d = {mask.vc_dim}"
    title += f", VC dimension {mask.vc_dim}" if mask.guarantees_vc_dim else ""
    title += f", {mask.boundary.describe()}" if mask.boundary.moves else ""
    geometry = mask.geometry
    sizes = f"{geometry.num_profiles} points, {geometry.num_types} hyperplanes"
    plain = mask.vc_dim == 1 or mask.num_distant == 0
    axes.set_title(
        f"{title}\n{'plain causal mask' if plain else f'q = {geometry.field_size}: {sizes}'}"
    )


def curves_figure(
    records: Sequence[Record], arms: Mapping[str, str], cells: Mapping[str, str]
) -> Figure | None:
    """Draw accuracy over loss against the step: a panel a cell, a line an arm, a band its seeds.

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
    panels = [
        cell for cell in dict.fromkeys([*cells, *points["cell"]]) if cell in set(points["cell"])
    ]
    num_columns = min(3, len(panels))
    num_lines = -(-len(panels) // num_columns) * len(quantities)
    looks = line_looks([*arms, *points["arm"]])
    looks = {arm: look for arm, look in looks.items() if arm in set(points["arm"])}
    with _style():
        from matplotlib.lines import Line2D

        figure = _figure(3.4 * num_columns + 0.4, 1.7 * num_lines + 0.12 * len(looks) + 0.5)
        grid = figure.subplots(num_lines, num_columns, squeeze=False, sharex=True)
        for axes in grid.flat[len(panels) * len(quantities) :]:
            axes.set_axis_off()
        for number, (cell, quantity) in enumerate(product(panels, quantities)):
            place, line = divmod(number, len(quantities))
            axes = grid[place // num_columns * len(quantities) + line, place % num_columns]
            _draw_curves(axes, points[points["cell"] == cell], quantity, looks)
            if quantity == "loss":
                _scale_losses(axes, points["loss"].dropna())
                same = [record for record in records if record.run.cell == cell]
                for level in {x for r in same for name, x in r.controls.items() if is_loss(name)}:
                    axes.axhline(level, color=INK, linewidth=0.8, linestyle=(0, (2, 3)))
            if line == 0:
                axes.set_title(cells.get(cell, cell) or "all", loc="left", fontweight="bold")
        handles = [Line2D([], [], label=arms.get(arm, arm), **look) for arm, look in looks.items()]
        figure.legend(handles=handles, loc="outside upper left", ncols=num_columns)
        figure.supxlabel("step", fontsize=9)
    return figure


def line_looks(arms: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Give every arm a colour and a kind of line that no other has.

    >>> line_looks(["mamba2", "smat_d3"])["smat_d3"]
    {'linestyle': '-', 'color': '#2a9d8f'}
    """
    looks = cycle(product(LINES, COLOURS))
    return {
        arm: {"linestyle": line, "color": colour}
        for arm, (line, colour) in zip(dict.fromkeys(arms), looks, strict=False)
    }


def over_seeds(points: DataFrame, quantity: str) -> DataFrame:
    """Join the curves of several seeds at the steps where every one has a number."""
    joined = points.groupby("step")[quantity].agg(["mean", "min", "max", "count"])
    return joined[(joined["count"] > 0) & (joined["count"] == joined["count"].max())]


def _draw_curves(
    axes: Axes, points: DataFrame, quantity: str, looks: Mapping[str, dict[str, Any]]
) -> None:
    for arm, look in looks.items():
        curve = over_seeds(points[points["arm"] == arm], quantity)
        marker = "o" if len(curve) == 1 else None
        axes.plot(curve.index, curve["mean"], marker=marker, label=arm, **look)
        if (curve["min"] < curve["max"]).any():
            band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(curve.index, curve["min"], curve["max"], **band)
    axes.grid(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(left=0)
    if quantity == "accuracy":
        axes.set_ylim(-4, 104)
        axes.set_yticks([0, 50, 100])
        axes.set_ylabel("accuracy, %")


def _scale_losses(axes: Axes, losses: Series) -> None:
    """Give the panels of a table one axis, logarithmic if the losses need it."""
    low, high = losses.min(), losses.max()
    lowest = max(losses[losses > 0].min(), SMALLEST * high)
    if low >= 0 and high > LOG_FROM * lowest:
        axes.set_yscale("log")
        axes.set_ylim(0.9 * lowest, 1.2 * high)
    else:
        axes.set_ylim(min(low, 0.0), high + 0.05 * abs(high))
    axes.set_ylabel(f"loss{', log scale' * (axes.get_yscale() == 'log')}")


def save_mask_figure(masks: Sequence[SMatMask], path: str | Path) -> Path:
    """Draw masks side by side with one legend; the file's suffix chooses the format."""
    return _save(mask_figure(masks), Path(path))


def save_bench_figure(result: Mapping[str, Any], path: str | Path) -> Path:
    """Draw the result of a benchmark; the file's suffix chooses the format."""
    return _save(bench_figure(result), Path(path))


def figure_svg(figure: Figure) -> str:
    """Write a figure as SVG whose ink is dark on a light screen and light on a dark one."""
    text = StringIO()
    with _style():
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue().replace(INK, "currentColor")
    return re.sub(r"(<svg [^>]*>)", rf"\1{SCREENS}", svg, count=1)


def _style() -> AbstractContextManager[None]:
    return require("matplotlib", extra="cli").rc_context(STYLE)


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> Path:
    if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        raise ValueError(
            f"cannot tell the picture format from {path.name!r}: use .png, .svg or .pdf"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with _style():
        figure.savefig(path, facecolor="white")
    return path


def bench_figure(result: Mapping[str, Any]) -> Figure:
    """Lay out one panel for the op, or one for each batch of decoding."""
    rows, config = result["rows"], result["config"]
    if not rows:
        raise ValueError("there is no row to draw: the benchmark timed nothing")
    decoding = result["benchmark"] == "decode"
    batches = sorted({row["batch"] for row in rows}) if decoding else [config["batch"]]
    what = "decoding" if decoding else "forward" + " + backward" * (result["benchmark"] == "train")
    with _style():
        figure = _figure(4.6 * len(batches) + 1.8, 4.3)
        panels = figure.subplots(1, len(batches), squeeze=False)[0]
        for axes, batch in zip(panels, batches, strict=True):
            same = [row for row in rows if row["batch"] == batch] if decoding else rows
            _draw_times(axes, same, "context" if decoding else "seq_len")
            axes.set_title(f"{what}, {format_sizes(config)}, batch {batch}")
            axes.set_xlabel("context, tokens" if decoding else "tokens T")
            axes.set_ylabel("milliseconds a token" if decoding else "milliseconds")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")
    return figure


def _draw_times(axes: Axes, rows: Sequence[Mapping[str, Any]], length: str) -> None:
    """Draw a line a variant: coloured by VC dimension, dashed with gates, dotted if it moves."""
    from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

    num_heads = max(row.get("heads", 1) for row in rows)
    for name in dict.fromkeys(row["name"] for row in rows):
        same = sorted((row for row in rows if row["name"] == name), key=lambda row: row[length])
        first, x = same[0], [row[length] for row in same]
        low, middle, high = (
            [1e3 * row["timing"][field] for row in same] for field in ("low", "median", "high")
        )
        heads = first.get("heads", num_heads)
        label = name if heads == num_heads else f"{name}, {count_heads(heads)}"
        colour = "#8d8d8d" if first["vc_dim"] is None else COLOURS[(first["vc_dim"] - 1) % 5]
        style = LINES[bool(first.get("gated")) + 2 * (first.get("window_step") is not None)]
        axes.plot(x, middle, style, color=colour, marker="o", label=label)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = sorted({row[length] for row in rows})
    axes.set_xticks(lengths, [format_length(tokens) for tokens in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(True)
    axes.spines[["top", "right"]].set_visible(False)


def format_sizes(config: Mapping[str, Any]) -> str:
    """Write the sizes of a problem on one line."""
    heads, key_dim, value_dim = (config[name] for name in ("heads", "key_dim", "value_dim"))
    return f"{count_heads(heads)}, K = {key_dim}, V = {value_dim}, {config['dtype']}"


def count_heads(heads: int) -> str:
    """Write a number of heads.

    >>> count_heads(1), count_heads(4)
    ('1 head', '4 heads')
    """
    return f"{heads} head{'s' * (heads != 1)}"


def format_length(tokens: int) -> str:
    """Write a length in units of 1024 where it is a multiple.

    >>> [format_length(tokens) for tokens in (1000, 1024, 262144)]
    ['1000', '1K', '256K']
    """
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)
