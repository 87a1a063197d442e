"""Records are read wherever they lie; what is not a record is named and skipped."""

import json

import pytest

from smat.report.experiments_data import RecordWarning, load_records, select, stale
from tests.report.experiments_case import EXPERIMENT, make_record, write_record


def accuracies(roots):
    return {
        (record["run"]["arm"], record["run"]["seed"]): record["accuracy"]
        for record in load_records(roots)
    }


def test_own_records_come_before_those_of_the_repository(tmp_path):
    own, committed = tmp_path / "out", tmp_path / "results"
    write_record(own / "records", make_record("softmax", "k=1", 0, 50.0))
    write_record(committed, make_record("softmax", "k=1", 0, 60.0))
    write_record(committed, make_record("softmax", "k=1", 1, 70.0))
    assert accuracies([own, committed]) == {("softmax", 0): 50.0, ("softmax", 1): 70.0}
    assert accuracies([committed, own])["softmax", 0] == 60.0


@pytest.mark.parametrize("has_records", [True, False])
def test_what_a_run_keeps_while_it_works_is_no_record(tmp_path, has_records):
    (tmp_path / "runs" / "made-up" / "abc").mkdir(parents=True)
    (tmp_path / "runs" / "made-up" / "abc" / "run.json").write_text("{}")
    if has_records:
        write_record(tmp_path / "records", make_record("softmax", "k=1", 0, 50.0))
    assert len(load_records([tmp_path])) == has_records


def test_a_root_that_is_not_there_holds_nothing(tmp_path):
    assert load_records([tmp_path / "none", tmp_path]) == []


BAD = {
    "broken": "{",
    "binary": "\udcff\udcfe",
    "list": "[1, 2]",
    "number": "3",
    "other JSON": '{"name": "package", "version": "1.0"}',
    "version": json.dumps(make_record("softmax", "k=1", 0, 50.0) | {"version": 2}),
    "no run": json.dumps(make_record("softmax", "k=1", 0, 50.0) | {"run": None}),
    "no accuracy": json.dumps(make_record("softmax", "k=1", 0, 50.0) | {"accuracy": None}),
    "NaN": json.dumps(make_record("softmax", "k=1", 0, 50.0) | {"accuracy": float("nan")}),
    "huge": json.dumps(make_record("softmax", "k=1", 0, 50.0) | {"minutes": 10**400}),
    "seed": json.dumps(make_record("softmax", "k=1", "0", 50.0)),
    "bool": json.dumps(make_record("softmax", "k=1", True, 50.0)),
    "controls": json.dumps(make_record("softmax", "k=1", 0, 50.0, controls={"a": "b"})),
    "curve": json.dumps(make_record("softmax", "k=1", 0, 50.0, curve=[[1, 2]])),
    "point": json.dumps(make_record("softmax", "k=1", 0, 50.0, curve=[[1, "x", None]])),
    "hardware": json.dumps(make_record("softmax", "k=1", 0, 50.0, hardware="EPYC")),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_record_is_skipped_by_name(tmp_path, name):
    write_record(tmp_path, make_record("smat_d2", "k=1", 0, 99.0))
    bad = tmp_path / "made-up" / "foreign.json"
    bad.write_bytes(BAD[name].encode(errors="surrogateescape"))
    with pytest.warns(RecordWarning, match=r"foreign\.json: ") as caught:
        records = load_records([tmp_path])
    assert len(caught) == 1
    assert [record["accuracy"] for record in records] == [99.0]


def test_a_folder_that_looks_like_a_record_is_skipped_too(tmp_path):
    (tmp_path / "folder.json").mkdir()
    with pytest.warns(RecordWarning, match=r"folder\.json"):
        assert load_records([tmp_path]) == []


def test_records_are_selected_by_experiment_and_preset():
    paper, quick = (make_record("softmax", "k=1", 0, 50.0, preset=p) for p in ("paper", "quick"))
    other = make_record("softmax", "k=1", 0, 50.0)
    other["run"] = other["run"] | {"experiment": "mqar"}
    records = [paper, quick, other]
    assert select(records, "made-up") == [paper, quick]
    assert select(records, "made-up", "quick") == [quick]


def test_records_of_settings_that_have_changed_since_are_known():
    fresh, old = (make_record("softmax", "k=1", seed, 50.0) for seed in (7, 8))
    old["key"] = "another"
    assert stale([fresh, old], EXPERIMENT, "paper") == [old]
    assert stale([fresh, old], EXPERIMENT, "no longer a preset") == []
