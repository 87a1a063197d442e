"""Records become the paper's tables: means, deviations, controls, loads."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smat.report.experiment_tables import CONTROL, OURS, PAPER, load_table, result_table
from smat.report.page import content_of
from smat.report.records import format_value, load_published, not_reproduced, published_keys
from tests.report.experiments_case import ARMS, CELLS, EXPERIMENT, PUBLISHED, key_of, make_record


def table_of(*records, experiment=EXPERIMENT, preset="paper"):
    return result_table(experiment, preset, records, PUBLISHED)


def means(table, kind, arm, label=None):
    """Return the means of a line by cell, as numbers."""
    numbers = table.numbers[(table.numbers["kind"] == kind) & (table.numbers["arm"] == arm)]
    numbers = numbers if label is None else numbers[numbers["label"] == label]
    return dict(zip(numbers["cell"], numbers["mean"], strict=True))


def lines(table, kind):
    """Return the names of the lines of a kind: arm and label."""
    return [(arm, label) for arm, its_kind, label in table.text.index if its_kind == kind]


@given(st.lists(st.floats(0, 100), min_size=2, max_size=6))
def test_mean_and_sample_deviation_over_seeds(numbers):
    table = table_of(*(make_record("softmax", "k=1", s, x) for s, x in enumerate(numbers)))
    ours = table.numbers[table.numbers["kind"] == OURS].iloc[0]
    mean = math.fsum(numbers) / len(numbers)
    std = math.sqrt(math.fsum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1))
    assert ours["mean"] == pytest.approx(mean, abs=1e-9)
    assert ours["std"] == pytest.approx(std, abs=1e-9)
    mean_text, std_text = table.text.loc[("softmax", OURS, "Softmax"), "k=1"].split(" ± ")
    assert abs(float(mean_text) - mean) <= 0.05 + 1e-9
    assert abs(float(std_text) - std) <= 0.05 + 1e-9


def test_one_seed_has_no_deviation():
    table = table_of(make_record("softmax", "k=1", 3, 50.0))
    assert table.text.loc[("softmax", OURS, "Softmax"), "k=1"] == "50.0"


@pytest.mark.parametrize(
    ("number", "decimals", "text"),
    [(46.55, 1, "46.6"), (0.05, 1, "0.1"), (-0.04, 1, "0.0"), (99.96, 1, "100.0"),
     (1e-7, 3, "0.000"), (1234.5, 0, "1235"), (5, 1, "5.0")],
)  # fmt: skip
def test_digits_are_rounded_as_they_are_written(number, decimals, text):
    assert format_value(number, decimals=decimals) == text


def test_every_arm_has_its_line_and_the_papers_below_it():
    table = table_of(*(make_record("softmax", "k=2", seed, 50.0 + seed) for seed in (0, 1, 2)))
    assert list(table.text.index) == [
        ("softmax", OURS, "Softmax"),
        ("softmax", PAPER, "paper"),
        ("smat_d2", OURS, ARMS["smat_d2"]),
        ("smat_d2", PAPER, "paper"),
        ("smat_d3", OURS, "SMat (d = 3)"),
        ("oracle", PAPER, "An oracle, paper only"),
    ]
    assert table.text.loc[("softmax", OURS, "Softmax"), "k=2"] == "51.0 ± 1.0"
    assert means(table, OURS, "softmax") == {"k=2": 51.0}
    assert means(table, PAPER, "softmax") == {"k=1": 100.0, "k=2": 46.55, "k=3": 7.81}
    assert list(table.text.loc[("softmax", PAPER, "paper")])[1:3] == ["46.6 ± 2.4", "7.8"]
    assert (table.num_filled, table.num_cells) == (1, 9)


def test_records_of_settings_that_the_preset_no_longer_has_do_not_show():
    old = make_record("softmax", "k=2", 0, 12.0, key="of another time")
    table = table_of(make_record("mamba9", "k=9", 0, 12.0), old)
    assert (table.cells, table.records, table.num_filled) == (CELLS, [], 0)
    assert table.left_out.startswith("2 of 2 runs were made with other settings")


def test_a_ceiling_stands_with_its_sampling_error():
    controls = {"expected ceiling": 49.3, "expected ceiling, sampling error": 1.1, "guess": 5.0}
    table = table_of(make_record("smat_d2", "k=2", 0, 50.0, controls=controls))
    texts = table.text["k=2"]
    assert texts["smat_d2", CONTROL, "expected ceiling"] == "49.3 ± 1.1"
    assert texts["smat_d2", CONTROL, "guess"] == "5.0"


def test_one_run_can_fill_several_cells():
    by_cell, key = {"k=1": 90.0, "k=2": 80.0}, key_of("paper", "softmax", "k=1", 0)
    table = table_of(make_record("softmax", "everything", 0, 57.0, by_cell=by_cell, key=key))
    assert table.cells == CELLS
    assert means(table, OURS, "softmax") == {"k=1": 90.0, "k=2": 80.0}


def test_runs_with_other_cells_stand_alone_and_the_papers_table_follows():
    by_cell, key = {"k=0.5": 90.0, "k=1": 80.0}, key_of("quick", "softmax", "k=1", 0)
    record = make_record("softmax", "all", 0, 57.0, "quick", by_cell=by_cell, key=key)
    table = table_of(record, preset="quick")
    assert table.own_cells
    assert table.cells == {"k=0.5": "k = 0.5", "k=1": "k = 1"}
    assert lines(table, PAPER) == []
    assert load_table(EXPERIMENT, "quick", [record]) is None
    section = content_of({"made-up": EXPERIMENT}, [record], PUBLISHED).sections[0]
    assert [(shown.preset, shown.own_cells) for shown in section.tables] == [("quick", True)]
    assert section.details[0]["source"] == "Table 99"


def test_controls_that_all_arms_share_stand_once_and_others_with_their_arm():
    records = [
        make_record(arm, "k=2", 0, 50.0, controls={"ceiling": ceiling, "metric ceiling": 99.35})
        for arm, ceiling in (("softmax", 74.5), ("smat_d2", 99.4))
    ]
    table = table_of(*records)
    assert lines(table, CONTROL) == [
        ("softmax", "ceiling"),
        ("smat_d2", "ceiling"),
        ("", "metric ceiling"),
    ]
    assert means(table, CONTROL, "") == {"k=2": 99.35}
    assert means(table, CONTROL, "softmax") == {"k=2": 74.5}
    assert means(table, CONTROL, "smat_d2") == {"k=2": 99.4}
    assert table.text.index[-1] == ("", CONTROL, "metric ceiling")


def test_a_control_that_only_one_arm_has_stays_with_it():
    table = table_of(make_record("smat_d2", "k=2", 0, 50.0, controls={"ceiling": 99.4}))
    assert lines(table, CONTROL) == [("smat_d2", "ceiling")]


def test_loads_get_a_table_of_their_own_with_the_controls_named_for_them():
    loads = {"T=64,N=4": 90.0, "T=64,N=8": 40.0}
    controls = {"guess": 3.0, "majority, T=64,N=4": 53.0, "majority, T=64,N=8": 26.0}
    records = [
        make_record("softmax", "k=2", seed, 65.0, by_cell=loads, controls=controls)
        for seed in (0, 1)
    ]
    table = load_table(EXPERIMENT, "paper", records)
    assert list(table.headings) == list(loads)
    shown = {label: list(texts) for (_, _, label), texts in table.text.iterrows()}
    assert shown == {
        "Softmax, k = 2": ["90.0 ± 0.0", "40.0 ± 0.0"],
        "majority": ["53.0", "26.0"],
    }
    assert lines(table_of(*records), CONTROL) == [("softmax", "guess")]


def test_a_task_with_one_load_needs_no_table_of_loads():
    assert load_table(EXPERIMENT, "paper", [make_record("softmax", "k=2", 0, 50.0)]) is None


def test_the_largest_settings_come_first_unless_hardly_any_of_it_is_run():
    quick = [make_record(arm, cell, 0, 50.0, preset="quick") for arm in ARMS for cell in CELLS]
    paper = [make_record(arm, cell, 0, 50.0) for arm in ARMS for cell in CELLS]
    presets = [["paper", "quick"], ["quick", "paper"]]
    for count, expected in zip((5, 1), presets, strict=True):
        for records in ([*quick, *paper[:count]], [*paper[:count], *quick]):
            content = content_of({"made-up": EXPERIMENT}, records, PUBLISHED)
            assert [table.preset for table in content.sections[0].tables] == expected


def test_an_experiment_without_a_run_still_shows_the_papers_numbers():
    content = content_of({"made-up": EXPERIMENT}, [], PUBLISHED)
    (section,) = content.sections
    assert section.tables == []
    assert section.not_run == ["quick", "paper"]
    assert section.details[0]["source"] == "Table 99"


def test_records_of_an_unknown_experiment_are_left_out():
    run = {"experiment": "nobody knows", "preset": "paper", "arm": "a", "cell": "c", "seed": 0}
    record = make_record("softmax", "k=1", 0, 50.0, run=run)
    assert content_of({"made-up": EXPERIMENT}, [record], PUBLISHED).records == []


@pytest.mark.parametrize(
    ("published", "labels"),
    [
        (None, []),
        ("tab:pg19", ["tab:pg19"]),
        ("tab:mqar-uniform, tab:mqar-placed", ["tab:mqar-uniform", "tab:mqar-placed"]),
    ],
)
def test_an_experiment_names_its_tables(published, labels):
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
