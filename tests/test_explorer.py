"""The explorer of the documentation, in headless Chromium: its masks are ours, bit for bit."""

import json
import re
import shutil
import subprocess
import warnings
from itertools import product
from pathlib import Path

import pytest
import torch

import smat
from smat import schedules

EXPLORER = Path(__file__).parents[1] / "docs" / "explorer"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium here; on Debian: apt-get install chromium"
)

LENGTHS = (16, 33, 64, 100, 128)
SETTINGS = [
    {"seqLen": length, "vcDim": d, "chunkSize": chunk, "schedule": schedule}
    for (length, d), (schedule, chunk) in zip(
        product(LENGTHS, (1, 2, 3, 4)),
        [("rebuilt", 8), ("window", 4), ("doubling", 8), ("none", 2), ("kept", 16)] * 4,
        strict=True,
    )
]
SETTINGS += [{**each, "schedule": "window", "step": 1 + i % 9} for i, each in enumerate(SETTINGS)]
SETTINGS += [{**each, "schedule": "rebuilt", "fieldSize": 5} for each in SETTINGS[:10]]
SETTINGS = [{"numDistant": 13, "step": 7, "fieldSize": 0, **each} for each in SETTINGS]

PAGE = Path(__file__).parent / "explorer_page.html"


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the browser computes for all settings, and says as the controls are moved."""
    folder = tmp_path_factory.mktemp("explorer")
    text = PAGE.read_text()
    for name in ("masks", "explorer"):
        text = text.replace(name.upper(), (EXPLORER / f"{name}.js").read_text(), 1)
    page = folder / "page.html"
    page.write_text(text.replace("SETTINGS", json.dumps(SETTINGS), 1), encoding="utf-8")
    command = [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
    found = re.search(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)
    assert found, done.stdout[:2000] + done.stderr[-2000:]
    return json.loads(found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&"))


def ours(setting):
    """Build the same mask with the library."""
    made = {
        "rebuilt": schedules.rebuilt, "none": schedules.none, "doubling": schedules.doubling,
        "kept": lambda: schedules.kept(setting["numDistant"]),
        "window": lambda: schedules.window(setting["step"]),
    }[setting["schedule"]]()  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", smat.SMatWarning)
        return smat.SMatMask(
            setting["seqLen"], setting["vcDim"], setting["chunkSize"], setting["fieldSize"] or None,
            boundary=made,
        )  # fmt: skip


def test_fifty_masks_are_those_of_the_library_bit_for_bit(seen):
    assert len(SETTINGS) == len(seen["found"]) == 50
    assert {each["schedule"] for each in SETTINGS} == {
        "rebuilt", "kept", "none", "doubling", "window",
    }  # fmt: skip
    for setting, found in zip(SETTINGS, seen["found"], strict=True):
        mask = ours(setting)
        bits = torch.tensor([int(digit, 16) for digit in found["bits"]])
        bits = ((bits[:, None] >> torch.tensor([3, 2, 1, 0])) & 1).flatten()
        length = setting["seqLen"]
        dense = bits[: length * length].view(length, length).bool()
        assert torch.equal(dense, mask.dense()), setting
        assert found["sees"] == bool(dense[-1, 0])


def test_sizes_are_those_of_the_library(seen):
    for setting, found in zip(SETTINGS, seen["found"], strict=True):
        mask = ours(setting)
        geometry = mask.geometry
        sizes = geometry.field_size, geometry.num_profiles, geometry.num_types, mask.num_distant
        assert (found["q"], found["P"], found["B"], found["n"]) == sizes
        assert found["isProved"] == mask.guarantees_vc_dim
        assert found["additions"] == geometry.tabulation_cost()


def test_controls_and_pointing_tell_about_the_query(seen):
    first, moved, pointed, windowed, facts = seen["steps"]
    assert first.startswith("Query 100 reads type 7: x1 + x2 = 2 (mod 5). Of 64 distant keys")
    mask = ours({"seqLen": 256, "vcDim": 4, "chunkSize": 32, "fieldSize": 0, "schedule": "rebuilt"})
    for text, query in ((moved, 200), (pointed, 150)):
        row = mask.dense()[query, : mask.num_distant]
        assert text.startswith(
            f"Query {query} reads type {int(mask.query_type(torch.tensor(query)))}:"
        )
        assert f"Of 128 distant keys it sees {int(row.sum())}: " in text
        assert f": {', '.join(map(str, row.nonzero().flatten()[:3].tolist()))}" in text
    assert windowed.startswith("Query 255")
    assert "It sees all 64 recent ones." in windowed
    assert "not proved: the boundary moves" in facts
