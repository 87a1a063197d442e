"""Draw benchmarks: time against length, by VC dimension and beside softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smat.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#2b2d42"
SOFTMAX_COLOUR = "#8d8d8d"
COLOURS = {1: "#4a7fb5", 2: "#2a9d8f", 3: "#e59500", 4: "#d1495b"}
OTHER_COLOUR = "#7b2d8b"

Row = Mapping[str, Any]


def save_bench_figure(result: Mapping[str, Any], path: str | Path) -> Path:
    """Draw the result of a benchmark; the file's suffix chooses the format."""
    path = Path(path)
    figure = bench_figure(result)
    if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        raise ValueError(
            f"cannot tell the picture format from {path.name!r}: use .png, .svg or .pdf"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")
    return path


def bench_figure(result: Mapping[str, Any]) -> Figure:
    """Lay out one panel for the op, or one for each batch of decoding."""
    require("matplotlib", extra="cli")
    from matplotlib.figure import Figure

    rows: Sequence[Row] = result["rows"]
    config = result["config"]
    if not rows:
        raise ValueError("there is no row to draw: the benchmark timed nothing")
    if result["benchmark"] == "decode":
        batches = sorted({row["batch"] for row in rows})
        figure = Figure(figsize=(4.6 * len(batches) + 1.2, 4.2), layout="constrained")
        axes = figure.subplots(1, len(batches), squeeze=False)[0]
        for axis, batch in zip(axes, batches, strict=True):
            same = [row for row in rows if row["batch"] == batch]
            _draw(axis, same, "context", "milliseconds a token")
            axis.set_title(
                f"decoding, {format_sizes(config)}, batch {batch}", fontsize=9, color=INK
            )
    else:
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        axis = figure.subplots()
        _draw(axis, rows, "seq_len", "milliseconds")
        passes = "forward + backward" if result["benchmark"] == "train" else "forward"
        axis.set_title(
            f"{passes}, {format_sizes(config)}, batch {config['batch']}", fontsize=10, color=INK
        )
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _draw(axis: Axes, rows: Sequence[Row], length: str, unit: str) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    num_heads = max(row.get("heads", 1) for row in rows)
    for name in dict.fromkeys(row["name"] for row in rows):
        same = sorted((row for row in rows if row["name"] == name), key=lambda row: row[length])
        x = [row[length] for row in same]
        seconds = [row["timing"] for row in same]
        middle = [1e3 * timing["median"] for timing in seconds]
        colour, style = _line(same[0])
        label = name + _fewer_heads(same[0], num_heads)
        axis.plot(x, middle, style, color=colour, marker="o", markersize=3.5, label=label)
        low, high = ([1e3 * timing[side] for timing in seconds] for side in ("low", "high"))
        axis.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    lengths = sorted({row[length] for row in rows})
    axis.set_xticks(lengths, [format_length(tokens) for tokens in lengths])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: _minor_label(value)))
    axis.set_xlabel("context, tokens" if length == "context" else "tokens T", color=INK)
    axis.set_ylabel(unit, color=INK)
    axis.tick_params(which="both", labelsize=8, color=INK, labelcolor=INK)
    axis.grid(alpha=0.25, linewidth=0.6)
    for side, spine in axis.spines.items():
        spine.set_color(INK)
        spine.set_linewidth(0.8)
        spine.set_visible(side in ("left", "bottom"))


def _minor_label(value: float) -> str:
    """Label 2 and 5 between powers of ten: enough for a narrow range, not too much for a wide."""
    return f"{value:g}" if f"{value:e}"[0] in "25" else ""


def _line(row: Row) -> tuple[str, str]:
    """Colour by VC dimension; dashes for gates, dots for a moving boundary."""
    if row["vc_dim"] is None:
        return SOFTMAX_COLOUR, "-"
    moves = row.get("window_step") is not None
    styles = {(False, False): "-", (True, False): "--", (False, True): ":", (True, True): "-."}
    return COLOURS.get(row["vc_dim"], OTHER_COLOUR), styles[bool(row.get("gated")), moves]


def _fewer_heads(row: Row, num_heads: int) -> str:
    """Say so if a line was timed with fewer heads than the others."""
    heads = row.get("heads", num_heads)
    return "" if heads == num_heads else f", {count_heads(heads)}"


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
