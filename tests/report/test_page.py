"""The page is whole, needs nothing else, and says the same as the Markdown beside it."""

import re
from base64 import b64decode
from itertools import product
from statistics import mean, stdev
from xml.etree import ElementTree

import pytest

from smat.report import page as page_module
from smat.report.page import content_of, prose, save_report, write_report
from smat.report.records import load_published
from tests.report.experiments_case import (
    ARMS,
    CELLS,
    EXPERIMENT,
    PUBLISHED,
    Page,
    make_record,
    write_record,
)
from tests.report.test_text_tables import read_markdown

ACCURACY = {
    (arm, cell, seed): 100.0 - 7.3 * a - 11.7 * c - 0.37 * seed * (1 + c)
    for (a, arm), (c, cell), seed in product(enumerate(ARMS), enumerate(CELLS), range(3))
    if (arm, cell) != ("smat_d3", "k=3")
}
RECORDS = [
    make_record(*place, value, controls={"ceiling": 99.0, "plateau loss": 0.377})
    for place, value in ACCURACY.items()
] + [make_record("smat_d2", "k=1", 0, 77.77, preset="quick")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    save_report(out, content_of({"made-up": EXPERIMENT}, RECORDS, PUBLISHED))
    return out


@pytest.fixture(scope="module")
def page(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def markdown(folder):
    return (folder / "report.md").read_text(encoding="utf-8")


def squeeze(text):
    return " ".join(text.split())


def results(page):
    """Return the tables of results, without that of what was run."""
    return [[[squeeze(cell) for cell in row] for row in table] for table in page.tables[1:]]


def test_the_page_has_every_table_and_what_was_run(page):
    overview, paper, seeds, quick, elsewhere = page.tables
    assert overview[1][1:] == ["paper", "8 of 9", "24 of 27", "3", "1.8 h"]
    assert overview[2][1:] == ["quick", "1 of 9", "1 of 27", "1", "4.5 min"]
    assert [row[0] for row in paper[1:]] == [
        "Softmax", "paper", ARMS["smat_d2"], "paper", "SMat (d = 3)", "An oracle, paper only",
        "ceiling", "plateau loss",
    ]  # fmt: skip
    assert "9 of 18 cells are filled." in squeeze("".join(page.words))
    assert [row[0] for row in elsewhere[1:]] == ["No branch", "Kept"]
    assert len(quick[0]) == len(paper[0]) == 1 + len(CELLS) + 3
    assert len(seeds[0]) == 1 + len(CELLS)


def test_every_seed_has_a_line_with_its_own_numbers(page):
    rows = {row[0]: row[1:] for row in page.tables[2][1:]}
    for (arm, cell, seed), accuracy in ACCURACY.items():
        shown = rows[f"{ARMS[arm]}, seed {seed}"][list(CELLS).index(cell)]
        assert abs(float(shown) - accuracy) <= 0.0500001


def test_every_number_is_the_mean_and_deviation_of_its_seeds(page):
    table = results(page)[0]
    rows = {row[0]: row for row in table}
    for arm, label in ARMS.items():
        for column, cell in enumerate(CELLS, start=1):
            seeds = [v for (a, c, _), v in ACCURACY.items() if (a, c) == (arm, cell)]
            if not seeds:
                assert rows[label][column] == "not run"
                continue
            shown_mean, shown_std = map(float, rows[label][column].split(" ± "))
            assert abs(shown_mean - mean(seeds)) <= 0.0500001
            assert abs(shown_std - stdev(seeds)) <= 0.0500001


def test_what_is_not_run_says_so(page):
    paper, _, quick = results(page)[:3]
    assert sum(row.count("not run") for row in paper) == 1
    assert sum(row.count("not run") for row in quick) == 8


def test_markdown_has_the_same_numbers(page, markdown):
    blocks = [block for block in markdown.split("\n\n") if block.startswith("|")]
    written = [read_markdown(block) for block in blocks]
    shown = results(page)
    assert len(written) == len(shown) == 4
    for lines, rows in zip(written, shown, strict=True):
        same = [[cell.replace("\\", "") for cell in line[1:]] for line in (lines[0], *lines[2:])]
        assert same == [row[1:] for row in rows]


def test_numbers_of_the_paper_alone_keep_their_digits(page):
    elsewhere = results(page)[-1]
    assert elsewhere[1] == ["No branch", "1.686 ± 0.006", "99"]
    assert elsewhere[2] == ["Kept", "1.670 ± 0.010", "0.5"]
    assert "Kept, size: a remark" in page.words


def test_labels_are_shown_and_never_obeyed(folder, page):
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert ARMS["smat_d2"] in [row[0] for row in page.tables[1]]
    words = "".join(page.words)
    for text in (EXPERIMENT.title, "A <CPU>", "Find <the> ", "Bits per <byte>"):
        assert text in words
        assert text not in html
    picture = ElementTree.parse(folder / "report-figures" / "made-up-paper-curves.svg")
    assert ARMS["smat_d2"] in ["".join(element.itertext()) for element in picture.iter()]
    assert ARMS["smat_d2"] not in html


def test_nothing_is_loaded_and_every_link_leads_somewhere(folder, page):
    html = (folder / "report.html").read_text(encoding="utf-8")
    assert all(picture.startswith("data:image/svg+xml;base64,") for picture in page.fetched)
    assert re.findall(r"https?://|@import|url\(", html) == []
    assert page.links
    assert all(link[0] == "#" and link[1:] in page.ids for link in page.links)
    assert len(page.ids) == len(set(page.ids))


def test_machine_time_and_commit_are_told(page, markdown):
    for text in ("".join(page.words), markdown.replace("&lt;", "<").replace("&gt;", ">")):
        assert "A <CPU>, 2 cores, torch 2.13.0" in text
        assert "0123456789" in text
        assert "1.8 h in all, 4.5 min a run" in text
        assert "A tenth of the steps. The paper: Table 99." in text
        assert "2026-11-16" in text


def test_pictures_lie_beside_the_markdown_and_in_the_page_and_need_nothing(folder, page, markdown):
    names = re.findall(r"!\[[^]]*\]\(([^)]*)\)", markdown)
    assert names == [
        "report-figures/made-up-paper-cells.svg",
        "report-figures/made-up-paper-curves.svg",
        "report-figures/made-up-quick-curves.svg",
        "report-figures/masks.svg",
    ]
    shown = [b64decode(picture.partition(",")[2]) for picture in page.fetched]
    assert shown == [(folder / name).read_bytes() for name in names]
    for name in names:
        picture = ElementTree.parse(folder / name).getroot()
        assert picture.tag == "{http://www.w3.org/2000/svg}svg"
        assert picture.get("viewBox")
        hrefs = [v for e in picture.iter() for k, v in e.attrib.items() if k.endswith("href")]
        assert all(href.startswith(("#", "data:")) for href in hrefs)


def test_the_same_records_give_the_same_page(folder, tmp_path):
    save_report(tmp_path, content_of({"made-up": EXPERIMENT}, RECORDS, PUBLISHED))
    for path in folder.rglob("*.*"):
        if path.is_file():
            assert (tmp_path / path.relative_to(folder)).read_bytes() == path.read_bytes()


def test_a_report_of_nothing_is_a_report(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "EXPERIMENTS", {"made-up": EXPERIMENT})
    monkeypatch.setattr(page_module.records, "load_published", lambda: PUBLISHED)
    path = write_report(tmp_path / "new", [tmp_path / "none"])
    assert path == tmp_path / "new" / "report.html"
    page = Page(path.read_text(encoding="utf-8"))
    assert not any("not run" in row for table in page.tables for row in table)
    assert "Not started: smat run made-up --preset quick begins it. The paper: Table 99." in (
        squeeze("".join(page.words))
    )


def test_the_experiments_and_tables_of_the_library_make_a_report(tmp_path):
    page = Page(write_report(tmp_path, [tmp_path]).read_text(encoding="utf-8"))
    words = squeeze(" ".join(page.words))
    for experiment in page_module.EXPERIMENTS.values():
        assert experiment.name in page.ids
        assert experiment.title in words
    for table in load_published().values():
        assert table["source"] in words


def test_records_come_from_the_roots(tmp_path, monkeypatch):
    monkeypatch.setattr(page_module, "EXPERIMENTS", {"made-up": EXPERIMENT})
    write_record(tmp_path / "a" / "records", make_record("softmax", "k=1", 0, 12.34))
    write_record(tmp_path / "b", make_record("softmax", "k=1", 0, 56.78))
    path = write_report(tmp_path / "a", [tmp_path / "a", tmp_path / "b"])
    assert results(Page(path.read_text(encoding="utf-8")))[0][1][1] == "12.3"


def test_records_of_changed_settings_are_pointed_out(tmp_path):
    record = make_record("softmax", "k=1", 0, 50.0, key="of another time")
    content = content_of({"made-up": EXPERIMENT}, [record], PUBLISHED)
    save_report(tmp_path, content)
    for name in ("report.html", "report.md"):
        assert "1 of 1 runs were made with other settings" in (tmp_path / name).read_text()


@pytest.mark.parametrize("curve", [[], [[0, 1.0, None]], [[5, None, 50.0]]])
def test_without_a_curve_nothing_is_drawn(curve, tmp_path):
    record = make_record("softmax", "k=1", 0, 50.0, curve=curve)
    save_report(tmp_path, content_of({"made-up": EXPERIMENT}, [record], PUBLISHED))
    html = (tmp_path / "report.html").read_text()
    assert len(Page(html).fetched) == 1  # the masks


def test_prose_keeps_lists_and_code_and_obeys_nothing_else():
    html = prose("A `b<c` d\ngoes on, a*b*c.\n\n- one\n- two\n  lines <i>")
    assert "".join(html.split("\n")) == (
        "<p>A <code>b&lt;c</code> dgoes on, a*b*c.</p>"
        "<ul><li>one</li><li>twolines &lt;i&gt;</li></ul>"
    )
    assert prose("") == ""
