"""Records lie where the contract says, and only the record of this very run counts."""

import json
from dataclasses import replace

import pytest
import tiny_table
from tiny import changed

from smat.experiments.store import BusyError, Store, claim, make_record
from smat.training.checkpoint import CURRENT, save_checkpoint

RUN = tiny_table.runs("quick", [0])[0]
RESULT = {
    "accuracy": 75.0, "by_cell": {"a": 75.0}, "loss": 0.5, "curve": [[1, 0.7, None]],
    "parameters": 10, "minutes": 0.1, "steps_per_second": 100.0,
}  # fmt: skip


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "out", tmp_path / "results")


def test_a_record_says_what_is_to_be_known(store):
    record = make_record(RUN, RESULT, "cpu")
    assert set(record) == {
        "version", "key", "run", "accuracy", "by_cell", "loss", "curve", "controls", "parameters",
        "minutes", "steps_per_second", "hardware", "commit", "finished",
        "unit", "source",
    }  # fmt: skip
    assert record["controls"] == {"chance": 50.0}
    assert {"cpu", "cores", "torch", "device"} <= set(record["hardware"])
    path = store.write(RUN, record)
    place = "out/records/parity/quick/narrow/T=4-s0.json"
    assert path.relative_to(store.root.parent).as_posix() == place
    assert store.find(RUN) == json.loads(path.read_text()) == record


def test_a_shipped_record_counts_if_asked_for_and_an_own_one_comes_first(store):
    path = store.committed / "parity/quick/narrow/T=4-s0.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(make_record(RUN, RESULT, "cpu")))
    assert store.find(RUN) is None
    store = replace(store, use_shipped=True)
    assert store.find(RUN)["accuracy"] == 75.0
    store.write(RUN, make_record(RUN, RESULT | {"accuracy": 80.0}, "cpu"))
    assert store.find(RUN)["accuracy"] == 80.0


def test_other_settings_are_another_run(store):
    store.write(RUN, make_record(RUN, RESULT, "cpu"))
    longer = changed(RUN, training=changed(RUN.training, steps=61))
    assert store.path(longer) == store.path(RUN)
    assert store.find(longer) is None
    often = changed(RUN, training=changed(RUN.training, checkpoint_seconds=1.0))
    assert store.find(often) is not None


def test_another_precision_is_another_run_with_a_record_of_its_own(store):
    (bf16,) = tiny_table.PARITY.with_training(precision="bf16-mixed").choose(
        "quick", [0], ["narrow", "T=4"]
    )
    assert bf16.key != RUN.key
    store.write(RUN, make_record(RUN, RESULT, "cpu"))
    store.write(bf16, make_record(bf16, RESULT | {"accuracy": 80.0}, "cpu"))
    assert [store.find(run)["accuracy"] for run in (RUN, bf16)] == [75.0, 80.0]


def test_new_code_with_the_same_settings_is_another_run_by_its_revision(store):
    store.write(RUN, make_record(RUN, RESULT, "cpu"))
    assert store.find(changed(RUN, revision=2)) is None


def test_a_changed_default_is_noticed_though_the_key_is_the_same(store):
    record = make_record(RUN, RESULT, "cpu")
    record["run"]["training"]["decay"] = "all"  # as if this had been the default then
    store.write(RUN, record)
    assert store.find(RUN) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"version": 1, "key": "?"}'])
def test_a_file_that_is_no_record_does_not_count(store, content):
    path = store.path(RUN)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert store.find(RUN) is None


def test_a_folder_is_claimed_by_one(tmp_path):
    with claim(tmp_path), pytest.raises(BusyError, match=f"at work in {tmp_path}"), claim(tmp_path):
        pass
    with claim(tmp_path):
        pass


def test_work_in_progress_is_what_was_begun_and_not_finished(store):
    assert list(store.work_in_progress()) == []
    folder = store.folder(RUN)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(RUN.to_dict()))
    assert list(store.work_in_progress()) == []
    with claim(folder):
        (line,) = store.work_in_progress()
        assert line == "running: parity quick narrow T=4 seed 0, no step is kept yet"
    for step in (7, 9):
        save_checkpoint(folder, {"step": step})
        (line,) = store.work_in_progress("parity")
        assert line.startswith("interrupted: parity quick")
        assert line.endswith(f"narrow T=4 seed 0, step {step} of 60 is kept")
        assert list(store.work_in_progress("mqar")) == []
    (folder / CURRENT).write_bytes(b"damaged")
    (line,) = store.work_in_progress()
    assert line.startswith("interrupted")
    assert line.endswith("step 7 of 60 is kept")
