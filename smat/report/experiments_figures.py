"""The pictures of the report: learning curves and masks, in the page and as files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files

from smat.experiments.run import Experiment
from smat.report.curve_axes import WIDTH, scale_of
from smat.report.experiments_data import Record
from smat.report.experiments_results import ResultTable
from smat.report.learning_curves import LineStyle, line_styles, panel
from smat.report.mask_panels import KINDS, example_masks, mask_caption, mask_svg, mask_title

GAP, KEY_HEIGHT = 24, 20
LETTER, SWATCH = 6.4, 52  # pixels of a letter of a legend, and of the line before it
MASK_SIZE = 200
MOST_ARMS = 40  # arms of a legend that light up when pointed at


def read_style(name: str) -> str:
    """Return a style sheet of the report."""
    return files("smat.report").joinpath(name).read_text(encoding="utf-8")


def curves_html(experiment: Experiment, table: ResultTable) -> str:
    """Lay the panels of a table out as a grid below one legend; nothing if there is no curve."""
    panels, styles = _panels(experiment, table)
    if not panels:
        return ""
    keys = [
        f'<li class="key key-{style.number}" tabindex="0">{_swatch(style)}'
        f"{escape(experiment.arms.get(arm, arm))}</li>"
        for arm, style in styles.items()
    ]
    figures = [
        f"<figure><figcaption>{escape(title)}</figcaption>{svg}</figure>"
        for title, svg in panels.items()
    ]
    return (
        f'<div class="curves"><ul class="legend">{"".join(keys)}</ul>'
        f'<div class="panels">{"".join(figures)}</div></div>'
    )


def curves_file(experiment: Experiment, table: ResultTable) -> str:
    """Draw the panels of a table and their legend as one SVG file; empty if there is no curve."""
    scale = scale_of(table.records)
    if scale is None:
        return ""
    panels, styles = _panels(experiment, table, titled=True)
    num_columns = min(3, len(panels))
    width = num_columns * WIDTH + (num_columns - 1) * GAP
    legend, top = _legend({experiment.arms.get(arm, arm): styles[arm] for arm in styles}, width)
    parts = [legend]
    for number, svg in enumerate(panels.values()):
        x, y = number % num_columns * (WIDTH + GAP), number // num_columns * (scale.height + GAP)
        place = f'<svg x="{x}" y="{top + y}" width="{WIDTH}" height="{scale.height}" '
        parts.append(svg.replace("<svg ", place, 1))
    height = top + -(-len(panels) // num_columns) * (scale.height + GAP)
    return _file(width, height, "".join(parts))


def _legend(styles: Mapping[str, LineStyle], width: int) -> tuple[str, int]:
    """Set the keys in columns that hold the longest; return them and the height they take."""
    key_width = round(SWATCH + LETTER * max(map(len, styles)))
    keys_a_row = max(1, width // key_width)
    keys = [
        f'<g class="key" transform="translate({number % keys_a_row * key_width} '
        f'{number // keys_a_row * KEY_HEIGHT})">{_swatch(style)}'
        f'<text x="32" y="13">{escape(label)}</text></g>'
        for number, (label, style) in enumerate(styles.items())
    ]
    return "".join(keys), -(-len(styles) // keys_a_row) * KEY_HEIGHT + GAP


def _panels(
    experiment: Experiment, table: ResultTable, titled: bool = False
) -> tuple[dict[str, str], dict[str, LineStyle]]:
    scale = scale_of(table.records)
    if scale is None:
        return {}, {}
    by_cell: dict[str, list[Record]] = {}
    for record in table.records:
        by_cell.setdefault(record["run"]["cell"], []).append(record)
    drawn = {record["run"]["arm"] for record in table.records if record.get("curve")}
    everyone = [*experiment.arms, *sorted(drawn.difference(experiment.arms))]
    styles = {arm: style for arm, style in line_styles(everyone).items() if arm in drawn}
    order = [*table.columns, *by_cell]
    panels = {}
    for cell in sorted(by_cell, key=order.index):
        title = table.columns.get(cell, cell) or "all"
        panels[title] = panel(by_cell[cell], styles, scale, title if titled else "")
    return panels, styles


def _swatch(style: LineStyle) -> str:
    return (
        '<svg class="swatch" width="26" height="18" viewBox="0 0 26 18" aria-hidden="true">'
        f'<g {style.attributes}><path d="M1 9H25"/></g></svg>'
    )


def highlight_style() -> str:
    """Let the other lines fade while one of the legend is pointed at; it needs no script."""
    rules = [
        f".curves:has(.key-{n}:is(:hover,:focus)) .panel .line:not(.arm-{n}){{opacity:.1}}"
        for n in range(MOST_ARMS)
    ]
    return "\n".join(rules)


def masks_html() -> str:
    """Show the masks for d = 1..4 and the stepped window, with what the colours mean."""
    figures = [
        f"<figure>{mask_svg(mask)}<figcaption><b>{mask_title(mask)}</b>"
        f"<span>{mask_caption(mask)}</span></figcaption></figure>"
        for mask in example_masks()
    ]
    keys = [f'<li><i class="chip {kind}"></i>{label}</li>' for kind, label in KINDS.values()]
    return f'<ul class="legend">{"".join(keys)}</ul><div class="masks">{"".join(figures)}</div>'


def masks_file() -> str:
    """Draw the same masks as one SVG file."""
    masks = example_masks()
    parts = []
    for number, mask in enumerate(masks):
        x = number * (MASK_SIZE + GAP)
        place = f'<svg x="{x}" y="0" width="{MASK_SIZE}" height="{MASK_SIZE}" '
        parts.append(mask_svg(mask).replace("<svg ", place, 1))
        parts.append(f'<text class="title" x="{x}" y="{MASK_SIZE + 20}">{mask_title(mask)}</text>')
        for line, text in enumerate(mask_caption(mask).split(", ")):
            y = MASK_SIZE + 38 + 16 * line
            parts.append(f'<text class="key" x="{x}" y="{y}">{text}</text>')
    return _file(len(masks) * (MASK_SIZE + GAP) - GAP, MASK_SIZE + 64, "".join(parts))


def _file(width: int, height: int, body: str) -> str:
    around = f"{-GAP} {-GAP} {width + 2 * GAP} {height + 2 * GAP}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="report" viewBox="{around}" '
        f'width="{width + 2 * GAP}" height="{height + 2 * GAP}">'
        f"<style>{read_style('figures.css')}</style>"
        f'<rect class="ground" x="{-GAP}" y="{-GAP}" width="100%" height="100%"/>{body}</svg>\n'
    )


def figure_files(tables: Mapping[str, tuple[Experiment, ResultTable]]) -> dict[str, str]:
    """Return the pictures that the Markdown report shows, by file name."""
    drawn = {name: curves_file(*pair) for name, pair in tables.items()}
    return {"masks.svg": masks_file(), **{name: svg for name, svg in drawn.items() if svg}}
