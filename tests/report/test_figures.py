"""Pictures: masks coloured by what each entry is, learning curves, benchmarks."""

import pytest
import torch

from smat.masks import boundary
from smat.masks.mask import SMatMask
from smat.report import figures
from smat.report.figures import (
    bench_figure,
    classify,
    curves_figure,
    figure_svg,
    line_looks,
    mask_figure,
    save_figure,
)
from smat.report.records import load_published
from tests.report.experiments_case import ARMS, CELLS, make_record

pytest.importorskip("matplotlib")

LONG = (figures.LONG_RANGE, figures.LONG_RANGE_NEXT)

SCHEDULES = [
    None,
    boundary.none(),
    boundary.kept(24),
    boundary.doubling(),
    boundary.window(8),
]


def one_of(kind, codes):
    return torch.isin(kind, torch.tensor(codes, dtype=kind.dtype))


@pytest.mark.filterwarnings("ignore::smat.masks.mask.SMatWarning")
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.describe() if s else "default")
@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
def test_colours_agree_with_the_mask(vc_dim, schedule):
    mask = SMatMask(64, vc_dim, chunk_size=8, boundary=schedule)
    kind = classify(mask)
    visible = mask.dense()
    position = torch.arange(64)
    distant = position[None, :] < mask.boundaries()[:, None]
    assert torch.equal(one_of(kind, (figures.CAUSAL, *LONG)), visible)
    assert torch.equal(one_of(kind, LONG), visible & distant)
    assert torch.equal(kind == figures.FUTURE, torch.ones(64, 64).triu(1).bool())


def test_hyperplanes_of_one_direction_share_a_colour():
    mask = SMatMask(128, 3, chunk_size=16)
    kind = classify(mask)
    q = mask.geometry.field_size
    for row in range(mask.num_distant, 128):
        direction = int(mask.query_type(torch.tensor([row]))) // q
        seen = kind[row, : mask.num_distant]
        assert set(seen[one_of(seen, LONG)].tolist()) == {LONG[direction % 2]}


def test_figure_has_a_panel_a_mask_and_one_legend():
    masks = [SMatMask(128, vc_dim, chunk_size=16) for vc_dim in (1, 2, 3)]
    figure = mask_figure(masks)
    assert [axis.get_title().split(",")[0] for axis in figure.axes] == ["d = 1", "d = 2", "d = 3"]
    assert len(figure.legends) == 1
    assert len(figure.legends[0].get_texts()) == 4


def test_a_picture_too_large_or_empty_is_refused():
    with pytest.raises(ValueError, match="5000"):
        mask_figure([SMatMask(5000, 3)])
    with pytest.raises(ValueError, match="at least one"):
        mask_figure([])


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"picture\.doc"):
        save_figure(mask_figure([SMatMask(128, 2, chunk_size=16)]), tmp_path / "picture.doc")
    assert list(tmp_path.iterdir()) == []


def curves(*records, arms=ARMS, cells=CELLS):
    """Return the axes of each quantity, panel by panel."""
    figure = curves_figure(records, arms, cells)
    by_quantity = {"accuracy": [], "loss": []}
    for axes in figure.axes:
        by_quantity[axes.get_ylabel().split(",")[0]].append(axes)
    return figure, by_quantity


def lines_of(axes):
    """Return the lines with points in them, by label."""
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    return {label: points for label, points in lines.items() if points and label[0] != "_"}


def test_curves_have_a_panel_a_cell_and_a_line_an_arm():
    records = [
        make_record(arm, cell, seed, 90.0, controls={"plateau loss": 0.377, "ceiling": 99.0})
        for arm in ARMS
        for cell in CELLS
        for seed in range(2)
        if (arm, cell) != ("smat_d3", "k=3")
    ]
    figure, axes = curves(*records)
    assert [a.get_title("left") for a in axes["accuracy"]] == list(CELLS.values())
    assert [len(lines_of(a)) for a in axes["loss"]] == [3, 3, 2]
    assert [len(lines_of(a)) for a in axes["accuracy"]] == [3, 3, 2]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(ARMS.values())
    for panel in axes["loss"]:
        levels = [line for line in panel.get_lines() if line.get_label().startswith("_")]
        assert [list(line.get_ydata()) for line in levels] == [[0.377, 0.377]]


def test_labels_are_no_formulas():
    arms = {"softmax": "$a$ _b"}
    figure, _ = curves(make_record("softmax", "k=1", 0, 90.0), arms=arms, cells={"k=1": "$k$"})
    assert "$a$ _b" in figure_svg(figure)
    assert "$k$" in figure_svg(figure)


def test_no_two_arms_of_the_paper_look_alike():
    for table in load_published().values():
        looks = [(look["linestyle"], look["color"]) for look in line_looks(table["rows"]).values()]
        assert len(set(looks)) == len(looks)


def test_curves_of_seeds_meet_where_all_have_a_number():
    records = [
        make_record("softmax", "k=1", 0, 80.0, curve=[[1, 4.0, 7.0], [2, 2.0, 10.0]]),
        make_record("softmax", "k=1", 1, 90.0, curve=[[1, 2.0, None], [2, 1.0, 30.0], [3, 1, 9]]),
    ]
    _, axes = curves(*records)
    assert lines_of(axes["loss"][0]) == {"Softmax": [[1, 3.0], [2, 1.5]]}
    assert lines_of(axes["accuracy"][0]) == {"Softmax": [[2, 20.0]]}
    first, second = (line.get_xydata().tolist() for line in axes["accuracy"][0].get_lines()[1:])
    assert (first, second) == ([[1, 7.0], [2, 10.0]], [[2, 30.0], [3, 9.0]])


@pytest.mark.parametrize(
    ("losses", "log"),
    [([0.7, 0.2], False), ([0.7, 0.0], False), ([0.7, 0.01], True), ([-1, 2], False)],
)
def test_losses_that_span_orders_of_magnitude_are_drawn_on_a_log_scale(losses, log):
    curve = [[step, loss, None] for step, loss in enumerate(losses, start=1)]
    _, axes = curves(make_record("softmax", "k=1", 0, 50.0, curve=curve))
    (panel,) = axes["loss"]
    assert (panel.get_yscale() == "log") == log
    low, high = panel.get_ylim()
    assert all(low <= loss <= high for loss in losses)


@pytest.mark.parametrize(("middle", "plots"), [(40.0, 2), (None, 1)])
def test_accuracy_is_drawn_where_it_was_evaluated_on_the_way(middle, plots):
    curve = [[1, 0.7, None], [2, 0.5, middle], [3, 0.4, 80.0]]
    figure, _ = curves(make_record("softmax", "k=1", 0, 80.0, curve=curve))
    assert len(figure.axes) == plots


@pytest.mark.parametrize("curve", [[], [[0, 1.0, None]], [[5, None, 50.0]]])
def test_without_a_curve_nothing_is_drawn(curve):
    record = make_record("softmax", "k=1", 0, 50.0, curve=curve)
    assert curves_figure([record], ARMS, CELLS) is None
    assert curves_figure([], ARMS, CELLS) is None


def test_a_picture_for_the_page_takes_its_ink_from_the_screen_and_has_no_date():
    svg = figure_svg(mask_figure([SMatMask(64, 2, chunk_size=8)]))
    assert "prefers-color-scheme: dark" in svg
    assert svg.count(figures.INK) == 1  # where the style says what the ink is
    assert "dc:date" not in svg
    assert svg == figure_svg(mask_figure([SMatMask(64, 2, chunk_size=8)]))


def timing(milliseconds):
    seconds = milliseconds / 1e3
    return {"low": 0.9 * seconds, "median": seconds, "high": 1.1 * seconds}


def test_a_benchmark_has_a_line_a_variant_in_milliseconds():
    sizes = {"batch": 1, "heads": 4, "key_dim": 8, "value_dim": 8, "dtype": "fp32"}
    rows = [
        {"name": name, "vc_dim": vc_dim, "seq_len": T, "heads": heads, "timing": timing(T / 100)}
        for name, vc_dim, heads in (("d = 3", 3, 4), ("softmax", None, 1))
        for T in (2048, 1024)
    ]
    figure = bench_figure({"benchmark": "train", "config": sizes, "rows": rows})
    (axes,) = figure.axes
    assert lines_of(axes) == {
        "d = 3": [[1024, 10.24], [2048, 20.48]],
        "softmax, 1 head": [[1024, 10.24], [2048, 20.48]],
    }
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1K", "2K"]
    assert axes.get_title() == "forward + backward, 4 heads, K = 8, V = 8, fp32, batch 1"
    with pytest.raises(ValueError, match="no row"):
        bench_figure({"benchmark": "train", "config": sizes, "rows": []})


def test_decoding_has_a_panel_a_batch():
    sizes = {"heads": 4, "key_dim": 8, "value_dim": 8, "dtype": "fp32"}
    rows = [
        {"name": "window", "vc_dim": 3, "context": 1024, "batch": batch, "timing": timing(1.0)}
        for batch in (8, 1)
    ]
    figure = bench_figure({"benchmark": "decode", "config": sizes, "rows": rows})
    assert [axes.get_title().rpartition(", ")[2] for axes in figure.axes] == ["batch 1", "batch 8"]
