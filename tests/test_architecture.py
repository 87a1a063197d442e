"""The code stays easy to live in: small files, nothing written twice, few files to a call."""

import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "smat").rglob("*.py"))
LONGEST, RUN = 300, 10


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_longer_than_a_subject(path):
    assert len(path.read_text().splitlines()) <= LONGEST


def runs_of(lines, size):
    """Yield every run of so many lines, blank ones left out, with the number of its first line."""
    filled = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    for first in range(len(filled) - size + 1):
        yield filled[first][0], tuple(line for _, line in filled[first : first + size])


def test_no_run_of_lines_stands_in_two_places():
    places = defaultdict(list)
    for path in MODULES:
        for number, run in runs_of(path.read_text().splitlines(), RUN):
            places[run].append(f"{path.relative_to(ROOT)}:{number}")
    assert [where for where in places.values() if len(where) > 1] == []


def test_the_search_finds_what_it_should():
    lines = [f"line {number}" for number in range(12)]
    assert len(list(runs_of([*lines, "", "   "], RUN))) == 3


def load_tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::smat.SMatWarning")
def test_a_call_goes_through_few_files():
    tool = load_tool("count_visits")
    for name, (call, limit) in tool.calls().items():
        visits = tool.count_visits(call)
        assert len(visits.files) <= limit, (name, sorted(visits.files))


def test_the_map_of_the_paper_names_the_right_lines():
    tool = load_tool("paper_map")
    text = tool.GUIDE.read_text()
    assert len(tool.ENTRY.findall(text)) >= 10
    assert tool.refresh(text) == text
    assert tool.refresh(text.replace(".py:", ".py:9")) == text
