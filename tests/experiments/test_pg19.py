"""Language models through the whole of an experiment: data, training, record, table."""

import json

import pytest
import torch

from smat.__main__ import main
from smat.experiments.run import Experiment, Preset
from smat.experiments.store import Store
from smat.experiments.tables import EXPERIMENTS
from smat.experiments.tables.pg19 import byte_rows, byte_task
from smat.training import TrainingConfig

TRAINING = TrainingConfig(steps=3, batch_size=2, learning_rate=1e-3, eval_every=2)
TINY = Experiment.of_presets(
    name="tiny-bytes",
    title="Made-up bytes",
    published=None,
    cells={},
    presets={
        "quick": Preset("all", byte_rows(byte_task(32, 2, num_validation=2), 16, 1, TRAINING))
    },
)
PARAMETERS = {"mamba2": 26.9e6, "smat_d3": 27.8e6, "softmax": 33.5e6}


@pytest.fixture
def smat(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(EXPERIMENTS, "tiny-bytes", TINY)
    monkeypatch.setenv("SMAT_DATA", "")  # and what the command sets is undone

    def command(*words):
        status = main(["run", "tiny-bytes", "--only", "window_4", *words, "--out", str(tmp_path)])
        return status, *capsys.readouterr()

    return command


def test_a_run_is_recorded_in_bits_per_byte(smat, token_folder, tmp_path):
    status, out, err = smat("--data", str(token_folder))
    assert status == 0, err
    record = json.loads((tmp_path / "records/tiny-bytes/quick/window_4/all-s0.json").read_text())
    assert record["unit"] == "bits per byte"
    assert list(record["by_cell"]) == ["[0,16)", "[16,32)", "[32,64)", "[64,128)", "[128,256)"]
    assert all(4 < value < 9 for value in record["by_cell"].values())
    assert record["tokens_per_second"] == pytest.approx(64 * record["steps_per_second"])
    assert [point[2] is None for point in record["curve"]] == [True, False, False]
    assert record["source"] == TINY.runs("quick", [0])[0].task.source()
    assert f"{record['accuracy']:.3f} bits per byte in" in err
    assert "in bits per byte" in out
    assert f"{record['by_cell']['[32,64)']:.3f}" in out
    assert "frequencies of the training books" in out


def test_missing_data_is_one_line(smat, tmp_path):
    for words in ([], ["--data", str(tmp_path / "none")]):
        status, out, err = smat(*words)
        assert (status, out) == (1, "")
        assert err.startswith("smat: error: ")
        assert err.count("\n") == 1
        assert "smat data prepare FOLDER_OF_PG19" in err
    assert not (tmp_path / "records").exists()


def test_a_record_of_other_data_is_no_finished_run(smat, token_folder, tmp_path, monkeypatch):
    assert smat("--data", str(token_folder))[0] == 0
    (run,) = TINY.choose("quick", [0], ["window_4"])
    store = Store(tmp_path)
    assert store.find(run) is not None
    monkeypatch.setattr(type(run.task), "source", lambda task: "other")
    assert store.find(run) is None
    status, _, err = smat("--data", str(token_folder))
    assert status == 1
    assert "and is other); to start anew: rm -r" in err
    monkeypatch.undo()
    monkeypatch.delenv("SMAT_DATA", raising=False)
    assert store.find(run) is not None  # without the data there is nothing to compare


def test_presets_are_the_papers():
    (bytes_run, *_) = EXPERIMENTS["pg19-bytes"].runs("paper", [0])
    assert (bytes_run.task.seq_len, bytes_run.task.eval_length) == (2048, 16384)
    for run in EXPERIMENTS["pg19-300m"].runs("paper", None):
        tokens = run.training.batch_size * run.task.seq_len
        assert (run.seed, tokens, run.training.steps, run.task.vocab_size) == (
            1,
            32768,
            9155,
            50257,
        )
        assert run.task.unit == "nats"
        assert run.cell == f"T={run.task.seq_len}"
    for run in EXPERIMENTS["pg19-750m"].runs("paper", None):
        tokens = run.training.batch_size * run.task.seq_len * run.training.steps
        assert (run.seed, run.task.scored_splits) == (123, ("validation",))
        assert tokens == pytest.approx(750e6, rel=1e-4)


@pytest.mark.parametrize("arm", PARAMETERS)
def test_models_have_the_papers_parameters(arm):
    (run,) = EXPERIMENTS["pg19-300m"].choose("paper", [1], [arm, "T=16384"])
    with torch.device("meta"):
        model = run.model.build(run.task)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == pytest.approx(PARAMETERS[arm], rel=5e-3)


def test_arms_of_a_table_differ_in_their_model_alone():
    balance = {"balance_weight": 0.0, "balance_anneal": 0}  # that of a memory, which others lack
    for name in ("pg19-bytes", "pg19-300m", "pg19-750m"):
        runs = EXPERIMENTS[name].runs("standard", [0])
        assert len({run.task for run in runs}) == 1
        assert len({run.training.changed(**balance).model_dump_json() for run in runs}) == 1
