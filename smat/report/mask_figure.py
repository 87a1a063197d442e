"""Draw masks: who sees whom, and along which hyperplane (Figure 1 and the stepped window)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smat.extras import require
from smat.masks.mask import SMatMask

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_SEQ_LEN = 4096  # a figure holds T x T cells, and no screen shows more

FUTURE, UNSEEN, CAUSAL, LONG_RANGE, LONG_RANGE_NEXT = range(5)
COLOURS = {
    FUTURE: "#ffffff",
    UNSEEN: "#efece6",
    CAUSAL: "#4a7fb5",
    LONG_RANGE: "#d1495b",
    LONG_RANGE_NEXT: "#e59500",
}
INK = "#2b2d42"


def classify(mask: SMatMask) -> Tensor:
    """Say what each entry of a mask is, as `(T, T)` codes of this module.

    >>> mask = SMatMask(seq_len=6, vc_dim=1, chunk_size=1)
    >>> classify(mask)
    tensor([[2, 0, 0, 0, 0, 0],
            [2, 2, 0, 0, 0, 0],
            [2, 2, 2, 0, 0, 0],
            [3, 3, 3, 2, 0, 0],
            [3, 3, 3, 2, 2, 0],
            [3, 3, 3, 2, 2, 2]], dtype=torch.uint8)

    Long-range entries alternate between two codes from one direction to the next, so that the
    parallel hyperplanes of a direction stand out as a band.
    """
    position = torch.arange(mask.seq_len)
    visible = mask.dense()
    distant = position[None, :] < mask.boundaries()[:, None]
    past = position[None, :] <= position[:, None]
    query_type = mask.query_type(position)
    odd_direction = (query_type // mask.geometry.field_size % 2 == 1)[:, None]
    kind = torch.full(visible.shape, FUTURE, dtype=torch.uint8)
    kind[past & ~visible] = UNSEEN
    kind[visible & ~distant] = CAUSAL
    kind[visible & distant] = LONG_RANGE
    kind[visible & distant & odd_direction] = LONG_RANGE_NEXT
    return kind


def save_mask_figure(masks: Sequence[SMatMask], path: str | Path) -> Path:
    """Draw masks side by side with one legend; the file's suffix chooses the format."""
    path = Path(path)
    figure = mask_figure(masks)
    if path.suffix.lstrip(".").lower() not in figure.canvas.get_supported_filetypes():
        raise ValueError(
            f"cannot tell the picture format from {path.name!r}: use .png, .svg or .pdf"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, facecolor="white")
    return path


def mask_figure(masks: Sequence[SMatMask]) -> Figure:
    """Lay masks out in a row, one panel each, over one legend."""
    if not masks:
        raise ValueError("there is no mask to draw: give at least one")
    for mask in masks:
        if mask.seq_len > MAX_SEQ_LEN:
            raise ValueError(
                f"seq_len {mask.seq_len} is too long to draw cell by cell: "
                f"use {MAX_SEQ_LEN} or less"
            )
    require("matplotlib", extra="cli")
    from matplotlib.figure import Figure

    panel, gap = 3.3, 0.25
    width = len(masks) * panel + (len(masks) - 1) * gap + 0.6
    figure = Figure(figsize=(max(width, 5.4), panel + 1.25), layout="constrained")
    axes = figure.subplots(1, len(masks), squeeze=False)[0]
    for axis, mask in zip(axes, masks, strict=True):
        _draw(axis, mask)
    axes[0].set_ylabel("query t", color=INK)
    kinds = {kind for mask in masks for kind in classify(mask).unique().tolist()}
    figure.legend(
        handles=_legend_handles(kinds),
        loc="outside lower center",
        ncols=4 if len(masks) > 2 else 2,
        frameon=False,
        fontsize=9,
    )
    return figure


def _draw(axis: Axes, mask: SMatMask) -> None:
    from matplotlib.colors import ListedColormap

    colours = ListedColormap(list(COLOURS.values()))
    axis.imshow(
        classify(mask).numpy(), cmap=colours, vmin=0, vmax=len(COLOURS) - 1, interpolation="nearest"
    )
    for start, stop, boundary in mask.segments():
        if boundary > 0:
            axis.plot([boundary - 0.5] * 2, [start - 0.5, stop - 0.5], color=INK, linewidth=1.1)
            axis.plot([-0.5, boundary - 0.5], [start - 0.5] * 2, color=INK, linewidth=0.6)
    last = mask.seq_len
    ticks = sorted({0, mask.num_distant, last} if not mask.boundary.moves else {0, last})
    axis.set_xticks([tick - 0.5 for tick in ticks], [str(tick) for tick in ticks])
    axis.set_yticks([tick - 0.5 for tick in ticks], [str(tick) for tick in ticks])
    axis.tick_params(length=3, labelsize=8, color=INK, labelcolor=INK)
    axis.set_xlabel("key j", color=INK)
    for spine in axis.spines.values():
        spine.set_color(INK)
        spine.set_linewidth(0.8)
    axis.set_title(_title(mask), fontsize=10, color=INK)


def _title(mask: SMatMask) -> str:
    geometry = mask.geometry
    heading = f"d = {mask.vc_dim}"
    if mask.guarantees_vc_dim:
        heading += f", VC dimension {mask.vc_dim}"
    if mask.boundary.moves:
        heading += f", {mask.boundary.describe()}"
    if mask.vc_dim == 1 or mask.num_distant == 0:
        return f"{heading}\nplain causal mask"
    return (
        f"{heading}\nq = {geometry.field_size}: {geometry.num_profiles} points, "
        f"{geometry.num_types} hyperplanes"
    )


def _legend_handles(kinds: set[int]) -> list[Any]:
    from matplotlib.patches import Patch

    labels = {
        CAUSAL: "causal",
        LONG_RANGE: "long range: on the hyperplane",
        LONG_RANGE_NEXT: "the same, next direction",
        UNSEEN: "zero: off the hyperplane",
    }
    return [
        Patch(facecolor=COLOURS[kind], edgecolor=INK, linewidth=0.5, label=label)
        for kind, label in labels.items()
        if kind in kinds
    ]
