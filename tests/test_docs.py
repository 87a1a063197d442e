"""The code of README and documentation runs and prints what it says, and named files exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = {"argvalues": PAGES, "ids": lambda path: path.name}
EXAMPLE = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)
WITH_CODE = [page for page in PAGES if EXAMPLE.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda path: path.name)
@pytest.mark.filterwarnings("ignore::smat.SMatWarning")
def test_the_examples_of_a_page_print_what_their_comments_say(page):
    code = "\n".join(EXAMPLE.findall(page.read_text()))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page.name, "exec"), {})
    assert printed.getvalue().splitlines() == re.findall(r"# -> (.*)", code)


def test_there_is_code_to_run():
    assert len(WITH_CODE) >= 8


@pytest.mark.parametrize("page", **IDS)
def test_every_link_and_named_file_exists(page):
    text = page.read_text()
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text)
    named = re.findall(r"`((?:smat|tests|docs|tools|examples|results)/[\w/.-]*)(?::\d+)?`", text)
    assert [name for name in links if not (page.parent / name).exists()] == []
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", **IDS)
def test_every_command_that_is_shown_is_one(page):
    """Ask the command line for each `smat ...` of a page, with the options that it names."""
    pytest.importorskip("typer")
    import typer

    from smat.cli import app

    known = typer.main.get_command(app)
    for words in re.findall(r"(?:`|^    )smat ((?:[a-z][\w-]*)[^`\n#]*)", page.read_text(), re.M):
        group, names = known, words.split()
        while names and hasattr(group, "commands"):
            assert names[0] in group.commands, f"smat {words}"
            group = group.commands[names.pop(0)]
        options = {option for each in group.params for option in (*each.opts, *each.secondary_opts)}
        assert {name for name in names if name.startswith("--")} <= {*options, "--help"}, words


def test_the_picture_is_small_enough_for_a_front_page():
    assert (ROOT / "docs" / "masks.png").stat().st_size < 200_000
