"""Every experiment: its runs are distinct, and named after its rows and columns."""

import json
from pathlib import Path

import pytest
import torch

from smat.experiments.store import COMMITTED, Store
from smat.experiments.tables import EXPERIMENTS
from smat.layers import MemorySettings

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


def test_routing_is_constant_as_in_the_paper_and_on_a_cosine_beside_it():
    runs = {run.arm: run for run in EXPERIMENTS["subset-routing"].runs("paper", [0])}
    for d in (1, 2, 3, 4):
        paper, cosine = runs[f"smat_d{d}"], runs[f"smat_d{d}_cosine"]
        assert (paper.training.schedule, cosine.training.schedule) == ("constant", "cosine")
        assert paper.task.num_eval == 2048
        assert EXPERIMENTS["subset-routing"].arms[cosine.arm].endswith("cosine rate")


@pytest.mark.parametrize("preset", PRESETS)
def test_multi_key_recall_has_a_convolution_of_3_everywhere(preset):
    tables = [name for name in EXPERIMENTS if name.startswith("multi-key-")]
    assert len(tables) == 4
    for name in tables:
        for run in EXPERIMENTS[name].runs(preset, [0]):
            assert run.model.options["conv_size"] == 3, run.arm


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_of_the_learned_staircase_differ_in_their_memory_alone(preset):
    runs = EXPERIMENTS["multi-key-learned"].runs(preset, [0])
    assert len({run.training.steps for run in runs}) == 1
    assert not any(run.model.learned_positions for run in runs)
    for run in runs:
        options, training = run.model.options, run.training
        if "request" in options.get("selector", ""):
            tokens = run.task.num_keys if options["selector"] == "request" else 4  # whatever k is
            assert (options["settings"], options["request_tokens"]) == ("even", tokens)
            assert training.balance_weight > 0 == training.balance_anneal  # it stays to the end
        else:
            assert training.balance_anneal == 1000
    assert all(run.model.mixer == "mamba2_smat" for run in runs if "smat" in run.arm)


@pytest.mark.parametrize("name", ["multi-key-learned", "pg19-300m"])
def test_rows_that_start_with_positive_keys_have_mamba2_alone_beside_them(name):
    by_arm = {run.arm: run for run in EXPERIMENTS[name].runs("standard", [0])}
    alone, plain = by_arm["mamba2_positive"], by_arm["mamba2"]
    assert alone.model.options == {**plain.model.options, "key_init": "positive"}
    assert alone.training == plain.training
    for arm in ("smat_d2_language", "mamba2_smat_d2"):
        if arm in by_arm:
            settings = MemorySettings.named(by_arm[arm].model.options["settings"])
            assert settings.key_init == "positive"
            assert by_arm[arm].training.balance_anneal == 0


@pytest.mark.parametrize("name", ["multi-key-recall", "length-generalization"])
def test_gated_masks_decay_in_the_recurrent_part_and_one_row_shows_the_other(name):
    runs = {run.arm: run.model for run in EXPERIMENTS[name].runs("paper", [0])}
    scopes = {arm: x.options["decay_scope"] for arm, x in runs.items() if x.mixer[:5] == "smat_"}
    assert {arm for arm, scope in scopes.items() if scope == "all"} == {
        arm for arm in scopes if arm.endswith("_decay_all")
    }
    assert list(scopes.values()).count("all") == 1


def test_every_seed_has_its_own_hash_tables():
    (run,) = EXPERIMENTS["multi-key-recall"].choose("quick", [0], ["smat_d3", "k=2"])

    def seed_of_tables(seed):
        torch.manual_seed(seed)
        return run.model.build(run.task).blocks[0].mixer.routing.seed

    assert seed_of_tables(1) == seed_of_tables(1) != seed_of_tables(2)


def test_joint_recall_is_scored_as_in_each_of_the_papers_tables():
    (run, *_) = EXPERIMENTS["joint-recall"].runs("paper", None)
    assert run.task.scored_splits == ("validation", "test")
    assert list(PUBLISHED["tab:joint_recall"]["columns"]) == ["accuracy"]
    assert list(PUBLISHED["tab:mom_macro"]["columns"]) == ["test"]
    assert EXPERIMENTS["joint-recall"].cells["accuracy"] == "validation"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_preset_in_fp32_where_the_paper_has_bf16_says_so(name):
    experiment = EXPERIMENTS[name]
    assert {run.training.precision for run in experiment.runs("paper", None)} == {"32-true"}
    if name not in ("subset-routing", "length-generalization", "pg19-bytes"):  # fp32, and not told
        assert "but in fp32" in experiment.presets["paper"]


@pytest.mark.skipif(not COMMITTED.exists(), reason="not a checkout")
def test_every_committed_record_counts_as_finished(tmp_path):
    committed = [path for path in COMMITTED.rglob("*.json") if path.parent.name != "costs"]
    made = [json.loads(path.read_text())["run"] for path in committed]  # with seeds of its own, too
    told = {(run["experiment"], run["preset"], run["training"]["precision"]) for run in made}
    store, found = Store(tmp_path), set()
    for name, preset, precision in told:
        seeds = sorted(
            {run["seed"] for run in made if (run["experiment"], run["preset"]) == (name, preset)}
        )
        runs = EXPERIMENTS[name].with_training(precision=precision).runs(preset, seeds)
        found |= {run.key for run in runs if store.find_shipped(run) is not None}
    assert len(found) == len(committed)
