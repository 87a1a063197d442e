"""Records are read wherever they lie; what is not a record is named and skipped."""

import json
from typing import get_args

import pytest

from smat.experiments.store import VERSION
from smat.report.records import (
    Record,
    RecordWarning,
    facts_of,
    load_records,
    select,
    select_current,
)
from tests.report.experiments_case import EXPERIMENT, make_record, plain_record, write_record


def accuracies(roots):
    return {(record.run.arm, record.run.seed): record.accuracy for record in load_records(roots)}


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
    "version": json.dumps(plain_record("softmax", "k=1", 0, 50.0) | {"version": 2}),
    "no run": json.dumps(plain_record("softmax", "k=1", 0, 50.0) | {"run": None}),
    "no accuracy": json.dumps(plain_record("softmax", "k=1", 0, 50.0) | {"accuracy": None}),
    "NaN": json.dumps(plain_record("softmax", "k=1", 0, 50.0) | {"accuracy": float("nan")}),
    "huge": json.dumps(plain_record("softmax", "k=1", 0, 50.0) | {"minutes": 10**400}),
    "seed": json.dumps(plain_record("softmax", "k=1", "0", 50.0)),
    "bool": json.dumps(plain_record("softmax", "k=1", True, 50.0)),
    "controls": json.dumps(plain_record("softmax", "k=1", 0, 50.0, controls={"a": "b"})),
    "curve": json.dumps(plain_record("softmax", "k=1", 0, 50.0, curve=[[1, 2]])),
    "point": json.dumps(plain_record("softmax", "k=1", 0, 50.0, curve=[[1, "x", None]])),
    "hardware": json.dumps(plain_record("softmax", "k=1", 0, 50.0, hardware="EPYC")),
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
    assert [record.accuracy for record in records] == [99.0]


def test_a_folder_that_looks_like_a_record_is_skipped_too(tmp_path):
    (tmp_path / "folder.json").mkdir()
    with pytest.warns(RecordWarning, match=r"folder\.json"):
        assert load_records([tmp_path]) == []


def test_records_of_the_version_that_runs_write_are_read():
    assert get_args(Record.model_fields["version"].annotation) == (VERSION,)


def test_records_are_selected_by_experiment_and_preset():
    paper, quick = (make_record("softmax", "k=1", 0, 50.0, preset=p) for p in ("paper", "quick"))
    run = {**paper.run.model_dump(), "experiment": "mqar", "preset": "quick"}
    other = make_record("softmax", "k=1", 0, 50.0, run=run)
    assert select([paper, quick, other], "made-up", "quick") == [quick]
    assert select([paper, quick, other], "made-up", "paper") == [paper]


def test_records_of_settings_that_have_changed_since_are_known():
    fresh, old = (
        make_record("softmax", "k=1", 7, 50.0),
        make_record("smat_d2", "k=1", 8, 5.0, key=""),
    )
    kept, note = select_current([fresh, old], EXPERIMENT, "paper")
    assert kept == [fresh]
    assert note.startswith("1 of 2 runs were made with other settings")
    assert select_current([fresh], EXPERIMENT, "paper") == ([fresh], "")
    assert select_current([fresh, old], EXPERIMENT, "no longer a preset") == ([], "")


def test_a_run_in_another_precision_stands_where_there_is_none_and_is_pointed_out():
    (run, *_) = EXPERIMENT.with_training(precision="bf16-mixed").choose(
        "paper", [7], ["softmax", "k=1"]
    )
    own, narrow = (
        make_record("softmax", "k=1", 7, 50.0),
        make_record("softmax", "k=1", 7, 40.0, key=run.key),
    )
    assert narrow.key != own.key
    shown, note = select_current([narrow], EXPERIMENT, "paper")
    assert (shown, note) == ([narrow], "1 of 1 runs were trained in bf16.")
    shown, note = select_current([narrow, own], EXPERIMENT, "paper")
    assert shown == [own]
    assert note.startswith("1 of 2 runs were made with other settings")


def test_facts_tell_machines_times_commits_and_days():
    told = [
        {"minutes": 3, "commit": "a" * 40, "finished": "2026-11-16T01:02:03+00:00"},
        {"minutes": 6, "commit": "b" * 40 + "+", "finished": "2026-11-18T01:02:03+00:00"},
        {"minutes": 9, "commit": None, "finished": "2026-11-17T01:02:03+00:00"},
    ]
    records = [make_record("softmax", "k=1", seed, 5.0, **x) for seed, x in enumerate(told)]
    assert facts_of(records) == {
        "runs": "3",
        "time": "18 min in all, 6.0 min a run (3.0 min to 9.0 min)",
        "machine": "A <CPU>, 2 cores, torch 2.13.0",
        "commit": "aaaaaaaaaa, bbbbbbbbbb+",
        "finished": "2026-11-16 to 2026-11-18",
    }
    many = [make_record("softmax", "k=1", seed, 5.0, commit=str(seed) * 12) for seed in range(6)]
    assert facts_of(many)["commit"] == "0000000000, 1111111111, 2222222222 and 3 more"
    assert facts_of([]) == {"runs": "none"}
