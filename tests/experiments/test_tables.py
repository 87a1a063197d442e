"""Every experiment: its runs are distinct, and named after its rows and columns."""

import json
from pathlib import Path

import pytest

from smat.experiments.store import COMMITTED, Store
from smat.experiments.tables import EXPERIMENTS

PUBLISHED = json.loads(
    (Path(__file__).parents[2] / "smat" / "experiments" / "published.json").read_text()
)
PRESETS = ("quick", "standard", "paper")


@pytest.mark.parametrize("name", EXPERIMENTS)
@pytest.mark.parametrize("preset", PRESETS)
def test_runs_are_distinct_and_named_after_the_table(name, preset):
    experiment = EXPERIMENTS[name]
    assert list(experiment.presets) == list(PRESETS)
    runs = experiment.runs(preset, None)
    assert len({run.key for run in runs}) == len(runs) > 0
    for run in runs:
        assert run.experiment == name
        assert run.preset == preset
        assert run.arm in experiment.arms
        assert run.cell in experiment.cells or run.cell == "all"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_seeds_can_be_given(name):
    runs = EXPERIMENTS[name].runs("quick", [7, 8])
    assert {run.seed for run in runs} == {7, 8}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_papers_rows_and_columns_have_ours_beside_them(name):
    experiment = EXPERIMENTS[name]
    for label in filter(None, (experiment.published or "").split(", ")):
        table = PUBLISHED[label]
        assert set(table["columns"]) <= set(experiment.cells), label
        # The paper's short table gathers all linear baselines in one row.
        assert set(table["rows"]) - {"linear_baselines"} <= set(experiment.arms), label


def test_mqar_takes_the_papers_steps():
    (run, *_) = EXPERIMENTS["mqar"].runs("paper", None)
    assert run.training.steps == 32 * 707
    assert run.training.batch_size == 256


def test_the_papers_routing_table_is_whole():
    runs = EXPERIMENTS["subset-routing"].runs("paper", None)
    smat = [run for run in runs if run.arm in ("smat_d1", "smat_d2", "smat_d3", "smat_d4")]
    assert len(smat) == 4 * 6 * 3
    assert {(run.training.steps, run.training.batch_size) for run in smat} == {(1500, 64)}
    assert {run.task.seq_len for run in runs} == {1024}


@pytest.mark.skipif(not COMMITTED.exists(), reason="not a checkout")
def test_every_committed_record_counts_as_finished(tmp_path):
    runs = [
        run
        for experiment in EXPERIMENTS.values()
        for preset in experiment.presets
        for run in experiment.runs(preset, None)
    ]
    store = Store(tmp_path)
    found = {store.find(run)["key"] for run in runs if store.find(run) is not None}
    assert len(found) == len(list(COMMITTED.rglob("*.json")))
