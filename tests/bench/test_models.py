"""`smat bench models` checks every model against its whole forward pass, then times all of it."""

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("pandas")

from smat.__main__ import main
from smat.bench.model_configs import MODELS, ModelsConfig
from smat.bench.models import check_model, make_model
from smat.models.routing_stream import RoutingStream
from smat.report.costs import cost_table, load_costs
from smat.report.page import format_costs, refresh, write_report
from smat.report.records import NOTHING, load_published

SMALL = [
    "--train-len", "64", "--prefill-len", "96", "--context", "80", "--steps", "3", "--repeats",
    "1", "--chunk-size", "8", "--batch", "2",
]  # fmt: skip
PUBLISHED = load_published()


@pytest.mark.parametrize("name", MODELS)
def test_decoding_and_training_equal_the_whole_pass_in_fp64(name):
    for each in check_model(ModelsConfig(chunk_size=8), name):
        assert each["error"] <= each["tolerance"], each


def test_the_table_has_every_pass_and_what_decoding_keeps(capsys, tmp_path):
    path = tmp_path / "costs" / "models.json"
    names = ["--model", "smat_d3", "--model", "softmax", "--no-memory"]
    assert main(["bench", "models", *SMALL, *names, "--json-out", str(path)]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if not line.startswith("Written to ")]  # a path
    assert max(map(len, lines)) <= 100
    record = json.loads(path.read_text())
    names = ["smat_d1", "smat_d3", "softmax"]
    found = [(row["pass"], row["seq_len"], row["name"]) for row in record["rows"]]
    passes = [("train", 64), ("prefill", 96), ("decode", 80)]
    assert found == [(*each, name) for each in passes for name in names]
    cache = {row["name"]: row["cache_bytes"] for row in record["rows"] if row["pass"] == "decode"}
    assert cache["softmax"] == 2 * (80 + 4) * 2 * 32 * 4  # keys and values up to the horizon
    types = make_model(ModelsConfig(chunk_size=8), "smat_d3", 84).mask.geometry.num_types
    assert cache["smat_d3"] == (types + 1) * 2 * 32 * 33 * 4
    assert {row["ratio_to_d1"] for row in record["rows"] if row["name"] == "smat_d1"} == {1.0}
    (costs,) = load_costs([tmp_path], PUBLISHED)
    assert costs.name == "models"
    assert "1 × (" in out
    drawn = ["prefill", "--seq-len", "64", "--seq-len", "128", "--vc-dim", "2", "--no-memory"]
    drawn += ["--gemm-size", "16", "--heads", "1", "--figure-out", str(tmp_path / "prefill.png")]
    prefill = str(tmp_path / "costs" / "prefill.json")
    assert main(["bench", *drawn, "--repeats", "1", "--json-out", prefill]) == 0
    write_report(tmp_path / "report", [tmp_path])
    text = (tmp_path / "report" / "report.md").read_text()
    assert "What the routing models cost" in text
    assert PUBLISHED["tab:e2e-routing"]["caption"] not in text  # it is reproduced now
    assert "report-figures/costs-prefill.svg" in text
    assert (tmp_path / "report" / "report-figures" / "costs-prefill.svg").exists()
    marked = "<!-- table: costs models -->\n<!-- end of table -->"
    assert format_costs(costs) in refresh(marked, [], [costs])
    assert "Not measured" in refresh(marked, [])


def test_ratios_stand_beside_the_papers():
    timing = {"median": 0.002}
    rows = [
        {"name": name, "pass": kind, "seq_len": length, "timing": timing, "ratio_to_d1": ratio}
        for kind, length in (("train", 16384), ("prefill", 262144), ("decode", 262144))
        for name, ratio in (("smat_d1", 1.0), ("smat_d3", 1.5), ("mamba2", 0.5))
    ]
    where = {"device": "cpu", "processor": "A CPU", "num_threads": 2, "torch": "2", "commit": None}
    record = {
        "rows": rows, "config": {"batch": 1, "head_dim": 32}, "checks": [{"error": 1e-7}],
        "environment": {**where, "time": "2026-11-18"},
    }  # fmt: skip
    text = cost_table("cpu", record, PUBLISHED["tab:e2e-routing"]).text
    lines = {(arm, label): list(texts) for (arm, _, label), texts in text.iterrows()}
    assert lines["smat_d3", "SMat (d = 3)"] == [*["1.5 × (2 ms)"] * 3, NOTHING]
    assert lines["smat_d3", "paper"] == [
        "1.95 × (25.1 ms)", "1.4 × (63.8 ms)", "1 × (0.25 ms)", "12 MB",
    ]  # fmt: skip
    assert lines["mamba2", "paper, optimised kernels"][:2] == ["0.667 × (8.6 ms)", NOTHING]
    assert lines["mamba2", "paper"][1] == "3.84 × (175 ms)"


def test_a_wrong_model_is_not_timed(capsys, tmp_path, monkeypatch):
    right = RoutingStream.step
    monkeypatch.setattr(
        RoutingStream, "step", lambda self, *given: (right(self, *given)[0] * 1.01, given[1])
    )
    path = tmp_path / "models.json"
    assert main(["bench", "models", *SMALL, "--json-out", str(path)]) == 1
    assert "decoded from" in capsys.readouterr().err
    assert not path.exists()


@pytest.mark.slow  # two processes of their own
def test_peak_memory_is_that_of_the_longest_length(tmp_path, capsys):
    path = tmp_path / "models.json"
    arguments = ["--model", "smat_d1", "--json-out", str(path)]
    assert main(["bench", "models", *SMALL, *arguments]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row.get("peak_extra_bytes", -1) >= 0 for row in rows] == [True, True, False]
    assert "peak memory" in capsys.readouterr().out


def test_an_unknown_model_is_refused():
    with pytest.raises(ValueError, match=r"must be one of smat_d1, .*, not gpt"):
        ModelsConfig(model=("gpt",))


def test_presets_have_the_papers_lengths():
    paper = ModelsConfig(preset="paper")
    assert (paper.batch, paper.train_lens, paper.context) == (64, (16384, 65536), 262144)
    assert ModelsConfig(preset="cpu").softmax_up_to == 65536
    assert ModelsConfig(preset="cpu").prefill_lens == (65536, 262144)
