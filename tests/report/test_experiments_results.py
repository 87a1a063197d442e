"""Records become the paper's tables: means, deviations, controls, loads."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smat.report.experiments_content import content_of, fullest_first
from smat.report.experiments_loads import load_table
from smat.report.experiments_published import load_published, not_reproduced, published_keys
from smat.report.experiments_results import CONTROL, OURS, PAPER, result_table
from smat.report.experiments_value import Value, format_number, format_value, mean_of
from tests.report.experiments_case import ARMS, CELLS, EXPERIMENT, PUBLISHED, make_record


def table_of(*records, experiment=EXPERIMENT, preset="paper"):
    return result_table(experiment, preset, records, PUBLISHED)


def rows_of(table, kind):
    return {group.label: [row for row in group.rows if row.kind == kind] for group in table.groups}


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6))
def test_mean_and_sample_deviation_over_seeds(numbers):
    value = mean_of(dict(enumerate(numbers)))
    mean = math.fsum(numbers) / len(numbers)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))
    assert value.mean == pytest.approx(mean, abs=1e-9)
    assert value.std == pytest.approx(std, abs=1e-9)
    shown = format_value(value)
    mean_text, std_text = shown.split(" ± ")
    assert abs(float(mean_text) - mean) <= 0.05 + 1e-9
    assert abs(float(std_text) - std) <= 0.05 + 1e-9


def test_one_seed_has_no_deviation():
    assert mean_of({3: 50.0}) == Value(50.0, None, {3: 50.0})
    assert format_value(mean_of({3: 50.0})) == "50.0"


@pytest.mark.parametrize(
    ("number", "decimals", "text"),
    [(46.55, 1, "46.6"), (0.05, 1, "0.1"), (-0.04, 1, "0.0"), (99.96, 1, "100.0"),
     (1e-7, 3, "0.000"), (1234.5, 0, "1235"), (5, 1, "5.0")],
)  # fmt: skip
def test_digits_are_rounded_as_they_are_written(number, decimals, text):
    assert format_number(number, decimals) == text


def test_every_arm_has_its_row_and_the_papers_below_it():
    table = table_of(*(make_record("softmax", "k=2", seed, 50.0 + seed) for seed in (0, 1, 2)))
    assert [group.label for group in table.groups] == [*ARMS.values(), "An oracle"]
    ours, paper = (rows_of(table, kind) for kind in (OURS, PAPER))
    assert ours["Softmax"][0].values == {"k=2": Value(51.0, 1.0, {0: 50.0, 1: 51.0, 2: 52.0})}
    assert paper["Softmax"][0].values["k=2"] == Value(46.55, 2.35)
    assert paper["Softmax"][0].values["k=3"] == Value(7.81, None)
    assert paper["SMat (d = 3)"] == []
    assert ours["An oracle"] == []
    assert (table.num_filled, table.num_cells) == (1, 9)


def test_arms_and_cells_that_the_experiment_no_longer_has_still_show():
    table = table_of(make_record("mamba9", "k=9", 0, 12.0))
    assert table.columns == {**CELLS, "k=9": "k=9"}
    assert rows_of(table, OURS)["mamba9"][0].values["k=9"].mean == 12.0


def test_one_run_can_fill_several_cells():
    by_cell = {"k=1": 90.0, "k=2": 80.0}
    table = table_of(make_record("softmax", "everything", 0, 57.0, by_cell=by_cell))
    assert table.columns == CELLS
    means = {cell: value.mean for cell, value in rows_of(table, OURS)["Softmax"][0].values.items()}
    assert means == {"k=1": 90.0, "k=2": 80.0}


def test_runs_with_other_cells_stand_alone_and_the_papers_table_follows():
    record = make_record("softmax", "all", 0, 57.0, "quick", by_cell={"k=0.5": 90.0, "k=1": 80.0})
    table = table_of(record, preset="quick")
    assert table.own_cells
    assert table.columns == {"k=0.5": "k = 0.5", "k=1": "k = 1"}
    assert all(rows == [] for rows in rows_of(table, PAPER).values())
    assert load_table(EXPERIMENT, "quick", [record]) is None
    section = content_of({"made-up": EXPERIMENT}, [record], PUBLISHED).sections[0]
    assert [(shown.preset, bool(shown.note)) for shown in section.tables] == [
        ("quick", True),
        ("paper", False),
    ]
    assert rows_of(section.tables[1].table, PAPER)["Softmax"][0].values["k=1"].mean == 100.0


def test_controls_that_all_arms_share_stand_once_and_others_with_their_arm():
    records = [
        make_record(arm, "k=2", 0, 50.0, controls={"ceiling": ceiling, "metric ceiling": 99.35})
        for arm, ceiling in (("softmax", 74.5), ("smat_d2", 99.4))
    ]
    table = table_of(*records)
    assert [(row.label, row.values["k=2"].mean) for row in table.controls] == [
        ("metric ceiling", 99.35)
    ]
    own = rows_of(table, CONTROL)
    assert own["Softmax"][0].label == "ceiling"
    assert own["Softmax"][0].values["k=2"].mean == 74.5
    assert own[ARMS["smat_d2"]][0].values["k=2"].mean == 99.4
    assert own["SMat (d = 3)"] == []


def test_a_control_that_only_one_arm_has_stays_with_it():
    table = table_of(make_record("smat_d2", "k=2", 0, 50.0, controls={"ceiling": 99.4}))
    assert table.controls == []
    assert rows_of(table, CONTROL)[ARMS["smat_d2"]][0].label == "ceiling"


def test_loads_get_a_table_of_their_own_with_the_controls_named_for_them():
    loads = {"T=64,N=4": 90.0, "T=64,N=8": 40.0}
    controls = {"guess": 3.0, "majority, T=64,N=4": 53.0, "majority, T=64,N=8": 26.0}
    records = [
        make_record("softmax", "k=2", seed, 65.0, by_cell=loads, controls=controls)
        for seed in (0, 1)
    ]
    table = load_table(EXPERIMENT, "paper", records)
    assert list(table.columns) == list(loads)
    assert table.groups[0].label == "Softmax, k = 2"
    assert table.groups[0].rows[0].values["T=64,N=8"] == Value(40.0, 0.0, {0: 40.0, 1: 40.0})
    assert [(row.label, {c: v.mean for c, v in row.values.items()}) for row in table.controls] == [
        ("majority", {"T=64,N=4": 53.0, "T=64,N=8": 26.0})
    ]
    main = table_of(*records)
    assert [row.label for row in rows_of(main, CONTROL)["Softmax"]] == ["guess"]


def test_a_task_with_one_load_needs_no_table_of_loads():
    assert load_table(EXPERIMENT, "paper", [make_record("softmax", "k=2", 0, 50.0)]) is None


def test_the_largest_settings_come_first_unless_hardly_any_of_it_is_run():
    quick = [make_record(arm, cell, 0, 50.0, preset="quick") for arm in ARMS for cell in CELLS]
    paper = [make_record(arm, cell, 0, 50.0) for arm in ARMS for cell in CELLS]
    presets = [["paper", "quick"], ["quick", "paper"]]
    for count, expected in zip((5, 1), presets, strict=True):
        content = content_of({"made-up": EXPERIMENT}, [*quick, *paper[:count]], PUBLISHED)
        tables = content.sections[0].tables
        assert [table.preset for table in tables] == expected
        assert [table.preset for table in fullest_first(tables[::-1], ["quick", "paper"])] == (
            expected
        )


def test_an_experiment_without_a_run_still_shows_the_papers_numbers():
    content = content_of({"made-up": EXPERIMENT}, [], PUBLISHED)
    (table,) = content.sections[0].tables
    assert table.preset == "paper"
    assert table.table.num_filled == 0
    assert content.sections[0].not_run == ["quick"]
    assert table.progress == "0 of 27"


def test_records_of_an_unknown_experiment_are_left_out():
    record = make_record("softmax", "k=1", 0, 50.0)
    record["run"] = record["run"] | {"experiment": "nobody knows"}
    assert content_of({"made-up": EXPERIMENT}, [record], PUBLISHED).records == []


@pytest.mark.parametrize(
    ("published", "labels"),
    [
        (None, []),
        ("tab:pg19", ["tab:pg19"]),
        ("tab:mqar-uniform", ["tab:mqar-uniform", "tab:mqar-placed"]),
        ("tab:mqar-uniform, tab:mqar-placed", ["tab:mqar-uniform", "tab:mqar-placed"]),
    ],
)
def test_an_experiment_names_its_tables_and_gets_those_that_continue_them(published, labels):
    assert published_keys(dataclasses.replace(EXPERIMENT, published=published)) == labels


def test_every_table_of_the_paper_is_either_with_an_experiment_or_in_the_last_section():
    published = load_published()
    mkar = dataclasses.replace(EXPERIMENT, published="tab:mkar")
    left = not_reproduced({"mkar": mkar}, published)
    assert "tab:pg19" in left
    assert "tab:mkar-softmax-sweep" in left
    with_it = set(published) - set(left)
    assert set(published_keys(mkar)) <= with_it
    assert "tab:mkar-seeds" in with_it
    assert set(published_keys(mkar)) <= set(published)
    assert not_reproduced({}, published) == published
