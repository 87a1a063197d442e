"""A table reads the same in Markdown and on a terminal: ours, the paper's, the controls."""

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.markdown import Markdown

from smat.experiments.tables import find_experiment
from smat.report import records
from smat.report.costs import load_costs
from smat.report.experiment_tables import result_table, split_columns
from smat.report.page import (
    MARKED,
    escape_markdown,
    format_markdown,
    print_table,
    refresh,
    refresh_file,
)
from smat.report.records import load_records
from tests.report.experiments_case import ARMS, EXPERIMENT, PUBLISHED, make_record, write_record

ROOT = Path(__file__).parents[2]
TEXT = "Before.\n<!-- table: subset-routing quick -->\nWHAT WAS\n<!-- end of table -->\nAfter.\n"

RECORDS = [
    *(make_record("softmax", "k=1", seed, value) for seed, value in enumerate((99.0, 100.0, 98.5))),
    make_record("softmax", "k=2", 0, 51.27),
    make_record("smat_d2", "k=1", 0, 98.04, minutes=0.5, parameters=1_360_000),
]


def read_markdown(text):
    """Return the cells of a Markdown table; an escaped bar does not separate."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines()]
    return [[cell.strip() for cell in line] for line in lines]


def markdown_table(records):
    return format_markdown(result_table(EXPERIMENT, "paper", records, PUBLISHED))


def test_markdown_has_ours_in_bold_and_the_papers_below():
    lines = read_markdown(markdown_table(RECORDS))
    assert lines[0] == ["", "k = 1", "k = 2", "k = 3", "seeds", "parameters", "min a run"]
    assert lines[1] == ["---", *["---:"] * 6]
    assert lines[2][:4] == ["**Softmax**", "99.2 ± 0.8 (n = 3)", "51.3 (n = 1)", "not run"]
    assert lines[2][4:] == ["1–3", "58 K", "4.5"]
    assert lines[3] == ["↳ paper", "100.0 ± 0.0", "46.6 ± 2.4", "7.8", "", "", ""]
    assert lines[4][1:] == ["98.0", "not run", "not run", "1", "1.4 M", "0.50"]
    assert lines[5][:4] == ["↳ paper", "99.9 ± 0.1", "–", "–"]
    assert lines[6] == ["**SMat (d = 3)**", *["not run"] * 3, "", "", ""]
    assert lines[7][:4] == ["↳ An oracle, paper only", "98.8 ± 0.5", "–", "–"]
    assert {len(line) for line in lines} == {7}


def test_labels_are_escaped():
    text = markdown_table(RECORDS)
    assert r"**SMat &lt;d\|2&gt; &amp; \*co\***" in text


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain words, k = 1", "plain words, k = 1"),
        ("a_b", r"a\_b"),
        ("[x](y) `z`", r"\[x\](y) \`z\`"),
        ("two\nlines", "two lines"),
        ("\\", "\\\\"),
    ],
)
def test_markdown_shows_what_was_written(text, escaped):
    assert escape_markdown(text) == escaped


def test_losses_among_controls_keep_three_decimals():
    records = [
        make_record(arm, "k=1", 0, 50.0, controls={"loss of a constant (nats)": 0.37677})
        for arm in ARMS
    ]
    lines = read_markdown(markdown_table(records))
    assert lines[-1][:3] == ["loss of a constant (nats)", "0.377", "–"]


def printed(folder, monkeypatch, preset="paper"):
    monkeypatch.setattr(records, "load_published", lambda: PUBLISHED)
    console = Console(width=200, record=True, file=StringIO())
    print_table(EXPERIMENT, preset, [folder], console)
    return console.export_text()


def test_a_terminal_shows_the_same_numbers_as_markdown(tmp_path, monkeypatch):
    for record in RECORDS:
        write_record(tmp_path, record)
    text = printed(tmp_path, monkeypatch)
    rows = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    lines = [[cell for cell in line[1:] if cell] for line in read_markdown(markdown_table(RECORDS))]
    first = next(index for index, row in enumerate(rows) if row[0] == "Softmax")
    shown = rows[first : first + len(lines) - 2]
    assert [row[1:] for row in shown] == lines[2:]
    assert shown[2][0] == ARMS["smat_d2"]  # as it is: no markup of the label is obeyed
    assert "as in the paper." in text
    assert "18 min in all" in text  # four runs of 4.5 minutes and one of half a minute
    assert "A <CPU>, 2 cores, torch 2.13.0" in text
    assert "0123456789" in text


def test_a_terminal_says_that_settings_have_changed(tmp_path, monkeypatch):
    write_record(tmp_path, make_record("softmax", "k=1", 0, 50.0, key="of another time"))
    assert "1 of 1 runs were made with other settings" in printed(tmp_path, monkeypatch)


def test_a_table_that_nobody_started_is_one_line(tmp_path, monkeypatch):
    text = printed(tmp_path, monkeypatch, preset="quick")
    assert text.strip() == "Not started: smat run made-up --preset quick begins it."


def test_a_wide_table_goes_on_below_and_loses_nothing():
    table = result_table(EXPERIMENT, "paper", RECORDS, PUBLISHED)
    whole = read_markdown(format_markdown(table))
    parts = [read_markdown(format_markdown(part)) for part in split_columns(table, 70)]
    assert len(parts) > 1
    console = Console(width=70, record=True, file=StringIO())
    console.print(Markdown("\n".join(map(format_markdown, split_columns(table, 70)))))
    assert "99.2 ± 0.8 (n = 3)" in console.export_text()  # no number is broken into two
    for number, line in enumerate(whole):
        assert [part[number][0] for part in parts] == [line[0]] * len(parts)
        assert [cell for part in parts for cell in part[number][1:]] == line[1:]


def test_only_what_stands_between_the_marks_changes():
    (run, *_) = find_experiment("subset-routing").runs("quick", None)
    record = make_record(run.arm, run.cell, run.seed, 12.34, "quick", key=run.key)
    name = record.run.model_copy(update={"experiment": "subset-routing"})
    found = [record.model_copy(update={"run": name})]
    new = refresh(TEXT, found)
    reduced = find_experiment("subset-routing").presets["quick"]
    begin = f"<!-- table: subset-routing quick -->\nPreset quick: {reduced}.\n\n"
    assert new.startswith(f"Before.\n{begin}| ")
    assert new.endswith("|\n<!-- end of table -->\nAfter.\n")
    assert "WHAT WAS" not in new
    assert "12.3" in new
    assert "not run" in new
    assert refresh(new, found) == new
    line = "Not started: `smat run subset-routing --preset quick` begins it.\n"
    assert refresh(new, []) == f"Before.\n{begin}{line}<!-- end of table -->\nAfter.\n"


def test_the_papers_table_stands_below_one_of_other_lengths():
    (run, *_) = find_experiment("length-generalization").runs("quick", None)
    given = {"preset": "quick", "by_cell": {"T=128": 98.7}, "key": run.key}
    record = make_record(run.arm, run.cell, run.seed, 98.7, **given)
    name = record.run.model_copy(update={"experiment": "length-generalization"})
    text = "<!-- table: length-generalization quick -->\n<!-- end of table -->"
    new = refresh(text, [record.model_copy(update={"run": name})])
    ours, uniform, placed = new.split("The paper: ")
    assert "98.7" in ours
    assert "| Boundary kept | 91.5 ± 3.7 |" in uniform
    assert "| Boundary kept | 35.4 ± 14.9 |" in placed


@pytest.mark.parametrize(("name", "preset"), [("no-such", "quick"), ("subset-routing", "slow")])
def test_an_unknown_table_is_refused(name, preset):
    text = f"<!-- table: {name} {preset} -->\n<!-- end of table -->"
    with pytest.raises(ValueError, match=f"no (experiment|preset) '{name}|{preset}'"):
        refresh(text, [])


def test_a_file_is_rewritten(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(TEXT)
    assert refresh_file(path, [tmp_path]) == 1
    assert path.read_text() == refresh(TEXT, [])


def test_the_documentation_shows_the_committed_results():
    page = (ROOT / "docs" / "results.md").read_text()
    assert MARKED.search(page)
    costs = load_costs([ROOT / "results"], records.load_published())
    assert refresh(page, load_records([ROOT / "results"]), costs) == page


def test_losses_have_three_decimals_and_their_unit(tmp_path, monkeypatch):
    for arm in ARMS:
        write_record(tmp_path, make_record(arm, "k=1", 0, 1.6344, unit="bits per byte"))
    text = printed(tmp_path, monkeypatch)
    assert "as in the paper., in bits per byte" in text
    assert text.count("1.634") == len(ARMS)
