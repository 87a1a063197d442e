"""Tables of a Markdown file, written anew from records."""

from pathlib import Path

import pytest

from smat.report.experiments_data import load_records
from smat.report.marked_tables import MARKED, refresh, refresh_file

ROOT = Path(__file__).parents[2]
TEXT = "Before.\n<!-- table: subset-routing quick -->\nWHAT WAS\n<!-- end of table -->\nAfter.\n"


def test_only_what_stands_between_the_marks_changes():
    new = refresh(TEXT, [])
    assert new.startswith("Before.\n<!-- table: subset-routing quick -->\n| ")
    assert new.endswith("|\n<!-- end of table -->\nAfter.\n")
    assert "WHAT WAS" not in new
    assert "not run" in new
    assert refresh(new, []) == new


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


def test_the_readme_shows_the_committed_results():
    readme = (ROOT / "README.md").read_text()
    assert MARKED.search(readme)
    assert refresh(readme, load_records([ROOT / "results"])) == readme
