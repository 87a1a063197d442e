"""Tables drawn as lines over their columns: ours, every seed's range, and the paper's."""

from smat.report.cell_figures import cells_figure
from smat.report.experiment_tables import result_table
from tests.report.experiments_case import ARMS, CELLS, EXPERIMENT, PUBLISHED, make_record
from tests.report.test_page import ACCURACY, RECORDS


def test_lines_are_the_means_and_bands_the_seeds():
    table = result_table(EXPERIMENT, "paper", RECORDS, PUBLISHED)
    figure = cells_figure(table, ARMS)
    (axes,) = figure.axes
    drawn = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    seeds = [v for (arm, cell, _), v in ACCURACY.items() if (arm, cell) == ("softmax", "k=1")]
    assert drawn[ARMS["softmax"]][0] == sum(seeds) / len(seeds)
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert {min(seeds), max(seeds)} <= set(heights)
    paper = [line for line in axes.get_lines() if line.get_linestyle() == ":"]
    assert [len(line.get_ydata()) for line in paper][:1] == [len(CELLS)]
    assert [each.get_text() for each in axes.get_xticklabels()] == list(CELLS.values())


def test_a_few_cells_make_no_line():
    few = [make_record("softmax", cell, 0, 50.0) for cell in list(CELLS)[:2]]
    assert cells_figure(result_table(EXPERIMENT, "paper", few, PUBLISHED), ARMS) is None
