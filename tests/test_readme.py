"""The README's example runs and prints what it says, and the files it names exist."""

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("example", re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
def test_an_example_prints_what_its_comments_say(example):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(example, {})
    assert printed.getvalue().splitlines() == re.findall(r"# -> (.*)", example)


def test_every_link_and_named_file_exists():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README)
    named = re.findall(r"`((?:smat|tests|docs)/[\w/.]*|[\w]+\.(?:txt|md|toml))`", README)
    assert links
    assert named
    assert [name for name in [*links, *named] if not (ROOT / name).exists()] == []


def test_the_picture_is_small_enough_for_a_front_page():
    assert (ROOT / "docs" / "masks.png").stat().st_size < 200_000
