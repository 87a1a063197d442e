"""Draw masks as SVG whose colours belong to the page, so that they suit paper and a dark screen."""

from __future__ import annotations

import warnings
from itertools import groupby

from smat.masks import boundary
from smat.masks.mask import SMatMask, SMatWarning
from smat.report.mask_figure import CAUSAL, LONG_RANGE, LONG_RANGE_NEXT, UNSEEN, classify

KINDS = {
    CAUSAL: ("causal", "recent past"),
    LONG_RANGE: ("long", "distant, on the hyperplane"),
    LONG_RANGE_NEXT: ("long-next", "the same, next direction"),
    UNSEEN: ("unseen", "distant, off the hyperplane"),
}
SEQ_LEN, WINDOW_LEN, WINDOW_STEP = 128, 96, 16


def example_masks() -> list[SMatMask]:
    """Return the masks that a report shows: d = 1..4, and the stepped window.

    >>> [mask.vc_dim for mask in example_masks()]
    [1, 2, 3, 4, 3]
    """
    window = boundary.window(WINDOW_STEP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SMatWarning)  # the caption says where d is not guaranteed
        fixed = [SMatMask(SEQ_LEN, vc_dim, chunk_size=16) for vc_dim in (1, 2, 3, 4)]
        return [*fixed, SMatMask(WINDOW_LEN, 3, chunk_size=16, boundary=window)]


def mask_svg(mask: SMatMask) -> str:
    """Draw a mask, a cell an entry and a row a query.

    >>> svg = mask_svg(SMatMask(seq_len=4, vc_dim=1, chunk_size=1))
    >>> svg.count("<path"), 'viewBox="0 0 4 4"' in svg  # recent, distant, and the line between
    (3, True)
    """
    paths: dict[int, list[str]] = {}
    for y, row in enumerate(classify(mask).tolist()):
        x = 0
        for kind, same in groupby(row):
            width = len(list(same))
            if kind in KINDS:
                paths.setdefault(kind, []).append(f"M{x} {y}h{width}v1h-{width}z")
            x += width
    size = mask.seq_len
    drawn = [f'<path class="{KINDS[kind][0]}" d="{"".join(d)}"/>' for kind, d in paths.items()]
    drawn += [
        f'<path class="boundary" d="M0 {start}H{border}V{stop}"/>'
        for start, stop, border in mask.segments()
        if border > 0
    ]
    return (
        f'<svg class="mask" viewBox="0 0 {size} {size}" role="img" '
        f'aria-label="{mask_title(mask)}">{"".join(drawn)}</svg>'
    )


def mask_title(mask: SMatMask) -> str:
    """Say which mask this is."""
    return f"d = {mask.vc_dim}" + (", stepped window" if mask.boundary.moves else "")


def mask_caption(mask: SMatMask) -> str:
    """Say what the geometry of a mask is.

    >>> mask_caption(SMatMask(seq_len=128, vc_dim=3, chunk_size=16))
    '25 points on 30 hyperplanes, VC dimension 3'
    """
    if mask.vc_dim == 1:
        return "the plain causal mask"
    geometry = mask.geometry
    text = f"{geometry.num_profiles} points on {geometry.num_types} hyperplanes"
    return f"{text}, VC dimension {mask.vc_dim}" if mask.guarantees_vc_dim else text
