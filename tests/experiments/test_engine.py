"""Finished runs are never repeated, failures stay with their run, processes share the work."""

import json
import signal
import threading
import time
from dataclasses import dataclass, replace

import pytest

pytest.importorskip("typer")

import tiny_table
import torch
from rich.console import Console
from tiny import TinyConfig, changed

from smat.experiments.cli import parse_seeds, stop_on_signal
from smat.experiments.display import Display
from smat.experiments.engine import Outcome, SerialEngine, run_all
from smat.experiments.parallel import ProcessEngine, watched
from smat.experiments.store import Store, claim
from smat.training import Progress
from smat.training.checkpoint import CURRENT, WEIGHTS

RUNS = tiny_table.runs("quick", [0])


@dataclass(frozen=True)
class Broken(TinyConfig):
    def build(self, task):
        raise RuntimeError("beyond repair")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "out", tmp_path / "results")


def make(runs, store, engine=None, stop=lambda: False, **options):
    """Make runs; return what became of them, and every step that was told of."""
    steps = []

    def note(run, progress):
        steps.append((run.key, progress.step))

    outcomes = run_all(runs, store, engine or SerialEngine("cpu"), note, stop, **options)
    return list(outcomes), steps


def weights(store, run):
    return (store.folder(run) / WEIGHTS).read_bytes()


def test_a_finished_run_is_not_repeated_unless_asked(store):
    first, steps = make(RUNS[:2], store)
    assert [outcome.kind for outcome in first] == ["finished", "finished"]
    assert {key for key, _ in steps} == {run.key for run in RUNS[:2]}
    assert store.unfinished(RUNS) == RUNS[2:]
    records = [store.path(run).read_text() for run in RUNS[:2]]
    assert make(RUNS[:2], store)[0] == []
    assert [store.path(run).read_text() for run in RUNS[:2]] == records
    again, _ = make(RUNS[:1], store, again=True)
    assert again[0].record["accuracy"] == first[0].record["accuracy"]


def test_a_shipped_record_is_enough_only_where_it_is_to_be_used(store):
    make(RUNS[:1], store)
    committed = store.committed / "parity/quick/narrow/T=4-s0.json"
    committed.parent.mkdir(parents=True)
    store.path(RUNS[0]).rename(committed)
    assert make(RUNS[:1], replace(store, use_shipped=True))[0] == []
    assert store.unfinished(RUNS[:1]) == RUNS[:1]
    assert store.count(RUNS) == (len(RUNS), 0, 1)


def test_checkpoints_go_when_the_record_is_there_and_weights_stay(store):
    make(RUNS[:1], store)
    names = {path.name for path in store.folder(RUNS[0]).iterdir()}
    assert {WEIGHTS, "run.json"} <= names
    assert not any("checkpoint" in name for name in names)
    assert any(name.startswith("events.out.tfevents") for name in names)


def test_a_run_that_fails_leaves_the_others_alone(store):
    bad = changed(RUNS[0], arm="bad", task=replace(RUNS[0].task, nan_at=5))
    worse = changed(RUNS[0], arm="worse", model=Broken())
    outcomes, _ = make([bad, worse, RUNS[1]], store)
    assert [outcome.kind for outcome in outcomes] == ["failed", "failed", "finished"]
    assert "the loss is nan at step 5" in outcomes[0].message
    assert "RuntimeError: beyond repair" in outcomes[1].message
    trace = store.folder(worse) / "error.txt"
    assert str(trace) in outcomes[1].message
    assert "Traceback" in trace.read_text()
    assert all("\n" not in outcome.message for outcome in outcomes)


def test_a_run_at_work_elsewhere_is_left_alone(store):
    with claim(store.folder(RUNS[0])):
        outcomes, _ = make(RUNS[:2], store)
    assert [outcome.kind for outcome in outcomes] == ["busy", "finished"]
    assert [outcome.kind for outcome in make(RUNS[:2], store)[0]] == ["finished"]


def test_a_folder_with_other_settings_is_refused(store):
    folder = store.folder(RUNS[0])
    folder.mkdir(parents=True)
    settings = RUNS[0].to_dict()
    settings["training"]["decay"] = "all"
    (folder / "run.json").write_text(json.dumps(settings))
    (outcome,), _ = make(RUNS[:1], store)
    assert "training.decay was 'all' and is 'matrices'" in outcome.message
    assert f"rm -r {folder}" in outcome.message


def test_stopping_keeps_the_step_and_going_on_gives_the_same_bits(store, tmp_path):
    calls = []

    def soon():
        calls.append(1)
        return len(calls) > 30

    outcomes, steps = make(RUNS[:3], store, stop=soon)
    assert [outcome.kind for outcome in outcomes] == ["stopped"]
    assert (store.folder(RUNS[0]) / CURRENT).exists()
    outcomes, steps = make(RUNS[:1], store)
    assert [outcome.kind for outcome in outcomes] == ["finished"]
    assert steps[0][1] > 20
    whole = Store(tmp_path / "whole", tmp_path / "results")
    make(RUNS[:1], whole)
    assert weights(store, RUNS[0]) == weights(whole, RUNS[0])


def test_two_processes_do_what_one_does_and_one_that_dies_is_replaced(store, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    dying = changed(RUNS[0], arm="dying", task=replace(RUNS[0].task, die_at=5))
    outcomes, steps = make([dying, *RUNS], store, ProcessEngine(2, "cpu"))
    kinds = {outcome.run.name: outcome.kind for outcome in outcomes}
    assert kinds == {run.name: "finished" for run in RUNS} | {dying.name: "failed"}
    assert {key for key, _ in steps} >= {run.key for run in RUNS}
    (lost,) = (outcome for outcome in outcomes if outcome.kind == "failed")
    assert "its process ended with SIGKILL; run the same command again" in lost.message
    serial = Store(tmp_path / "serial", tmp_path / "results")
    make(RUNS[:1], serial)
    assert weights(serial, RUNS[0]) == weights(store, RUNS[0])
    assert make(RUNS, store, ProcessEngine(2, "cpu"))[0] == []


def test_processes_stop_when_asked(store):
    began = threading.Event()

    def note(run, progress):
        if progress.step > 0:
            began.set()

    engine, slow = ProcessEngine(1, "cpu"), tiny_table.runs("slow", [0])
    outcomes = list(run_all(slow, store, engine, note, began.is_set))
    assert [outcome.kind for outcome in outcomes] == ["stopped"]
    assert (store.folder(outcomes[0].run) / CURRENT).exists()


def test_the_first_ctrl_c_asks_and_the_second_interrupts():
    told = []
    with stop_on_signal(told.append) as should_stop:
        assert not should_stop()
        signal.raise_signal(signal.SIGINT)
        assert should_stop()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert told == ["stopping at the next step; Ctrl-C again stops at once"]


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ((), {"narrow T=4", "narrow T=6", "wide T=4", "wide T=6"}),
        (("wide",), {"wide T=4", "wide T=6"}),
        (("T=6",), {"narrow T=6", "wide T=6"}),
        (("wide", "T=6"), {"wide T=6"}),
        (("w*", "narrow", "T=4"), {"narrow T=4", "wide T=4"}),
    ],
)
def test_only_chooses_arms_and_cells(only, names):
    runs = tiny_table.PARITY.choose("quick", [0], only)
    assert {f"{run.arm} {run.cell}" for run in runs} == names


def test_what_cannot_be_chosen_is_named_with_what_can():
    with pytest.raises(ValueError, match="parity has no preset 'fast'; known: quick, slow"):
        tiny_table.PARITY.choose("fast")
    with pytest.raises(ValueError, match="no arm or cell 'x'; arms: narrow, wide; cells: T=4, T=6"):
        tiny_table.PARITY.choose("quick", only=["x"])
    with pytest.raises(ValueError, match="seeds are whole numbers, as 0,1,2, not '0;1'"):
        parse_seeds("0;1")


def test_time_left_is_guessed_from_the_steps_made_by_this_command(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    display = Display(RUNS, Console(quiet=True))  # four runs of 60 steps
    display.progressed(RUNS[0], Progress(20, 60))  # of which this one resumes at 20
    assert display.left_text() == ""
    now[0] += 40.0
    display.progressed(RUNS[0], Progress(40, 60))
    assert display.left_text() == "0:06:40 left"
    now[0] += 20.0
    record = {"minutes": 1.0, "accuracy": 50.0}
    display.ended(Outcome(RUNS[0], "finished", record))
    assert display.left_text() == "0:04:30 left"
    display.ended(Outcome(RUNS[1], "failed"))
    assert display.left_text() == "0:03:00 left"


def test_whether_to_stop_is_asked_in_another_thread_until_the_run_is_over():
    stop, askers = threading.Event(), set()

    def ask():
        askers.add(threading.current_thread())
        time.sleep(0.05)
        return stop.is_set()

    with watched(ask, seconds=0.01) as should_stop:
        assert not should_stop()
        stop.set()
        until = time.monotonic() + 30
        while not should_stop() and time.monotonic() < until:
            time.sleep(0.01)
        assert should_stop()
    with watched(ask, seconds=0.01) as should_stop:
        assert should_stop()  # the first answer is waited for: this run does not begin
    stop.clear()
    with watched(ask, seconds=0.01) as should_stop:
        assert not should_stop()
    assert threading.current_thread() not in askers
    assert not any(thread.is_alive() for thread in askers)
