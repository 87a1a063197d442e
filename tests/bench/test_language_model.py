"""The commands that print what a language model costs, in small and at the paper's size."""

import json

import pytest
from typer.testing import CliRunner

from smat.bench.cli import app

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
SMALL = ["--layers", "1", "--width", "32", "--head-dim", "16", "--vocab-size", "64"]


def run(tmp_path, *arguments):
    result = CliRunner().invoke(app, [*arguments, "--json-out", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    return json.loads((tmp_path / "out.json").read_text())


def test_a_step_in_small(tmp_path):
    record = run(tmp_path, "lm-step", *SMALL, "--seq-len", "64", "--checkpointing")
    assert [row["name"] for row in record["rows"]] == ["forward", "backward"]
    assert {check["quantity"] for check in record["checks"]} == {"loss", "gradient"}
    assert all(row["peak_bytes"] > 10_000_000 for row in record["rows"])


def test_an_answer_in_small(tmp_path):
    arguments = ["--context", "64", "--prompt", "80", "--tokens", "40", "--piece", "20"]
    record = run(tmp_path, "lm-generate", *SMALL, *arguments)
    assert [row["context"] for row in record["rows"]] == [100, 120]
    assert record["rows"][0]["cache_bytes"] == record["rows"][1]["cache_bytes"] > 0


@pytest.mark.slow
def test_a_step_of_the_papers_model_fits_in_12_gigabytes(tmp_path):
    rows = run(tmp_path, "lm-step")["rows"]
    assert max(row["peak_bytes"] for row in rows) < 12e9


@pytest.mark.slow
def test_two_thousand_tokens_cost_no_more_than_the_first(tmp_path):
    rows = run(tmp_path, "lm-generate")["rows"]
    first, last = rows[1], rows[-1]
    assert last["context"] >= 3024
    assert last["cache_bytes"] == first["cache_bytes"]
    assert last["peak_bytes"] < 1.02 * first["peak_bytes"]
    assert last["median"] < 1.5 * first["median"]
