"""`list`, `run`, `status` and `report` print what they promise, and an error is one line."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("typer")

import tiny_table
from tiny import changed

from smat.__main__ import main
from smat.experiments.tables import EXPERIMENTS

RUN_ONE = ["run", "parity", "--seeds", "0", "--only", "wide", "--only", "T=4", "--device", "cpu"]


@pytest.fixture
def smat(capsys, monkeypatch, tmp_path):
    """Run a command on the tiny experiment; return its exit status and what it printed."""
    monkeypatch.setitem(EXPERIMENTS, "parity", tiny_table.PARITY)

    def command(*arguments):
        status = main(
            [*arguments, *(["--out", str(tmp_path)] if "--help" not in arguments else [])]
        )
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return command


def test_run_makes_records_and_prints_the_table(smat, tmp_path):
    status, out, err = smat(*RUN_ONE)
    assert status == 0, err
    assert "parity, preset quick: 1 runs, 0 finished, 1 to make" in err
    record = json.loads((tmp_path / "records/parity/quick/wide/T=4-s0.json").read_text())
    assert f"1/1  wide T=4 seed 0: {record['accuracy']:.1f} % in " in err
    assert "Parity of two bits" in out
    assert f"{record['accuracy']:.1f}" in out

    status, out, err = smat(*RUN_ONE)
    assert status == 0
    assert "1 runs, 1 finished, 0 to make" in err
    assert "Parity of two bits" in out

    status, _, err = smat(*RUN_ONE, "--again")
    assert status == 0
    assert "1/1  wide T=4 seed 0" in err

    status, out, _ = smat("status")
    assert status == 0
    assert "parity, quick: 1 of 8" in out
    assert "parity, slow: 0 of 8" in out

    status, out, _ = smat("list")
    assert status == 0
    (line,) = (line for line in out.splitlines() if "All of it." in line)
    assert [part.strip() for part in line.strip("│").split("│")] == [
        "parity", "quick", "8", "1", "0", "All of it.",
    ]  # fmt: skip


def test_a_run_that_fails_ends_with_status_1_and_the_command_to_go_on(smat, monkeypatch):
    def failing(preset, seeds):
        (run, *_) = tiny_table.runs(preset, seeds)
        return [changed(run, task=replace(run.task, nan_at=3))]

    monkeypatch.setitem(EXPERIMENTS, "parity", replace(tiny_table.PARITY, runs=failing))
    status, _, err = smat("run", "parity")
    assert status == 1
    (line,) = (line for line in err.splitlines() if line.startswith("failed: "))
    assert line.startswith("failed: narrow T=4 seed 0: the loss is nan at step 3 (learning rate")
    assert "1 of 1 runs are left, 1 failed; go on with:" in err


def test_the_command_to_go_on_is_complete(smat, monkeypatch, tmp_path):
    assert smat(*RUN_ONE, "--precision", "bf16")[0] == 0
    assert (tmp_path / "records/parity/quick/wide/T=4-s0-bf16-mixed.json").exists()

    def failing(preset, seeds):
        runs = tiny_table.runs(preset, seeds)
        return [changed(run, task=replace(run.task, nan_at=3)) for run in runs]

    monkeypatch.setitem(EXPERIMENTS, "parity", replace(tiny_table.PARITY, runs=failing))
    options = ["--precision", "bf16", "--use-shipped", "--out", str(tmp_path)]
    status, _, err = smat(*RUN_ONE, *options[:-2])
    assert status == 1
    assert "Logging error" not in err
    words = ["smat", "run", "parity", "--preset", "quick", *RUN_ONE[2:], *options]
    assert f"  {' '.join(words)}\n" in err


def test_runs_to_be_made_again_do_not_look_finished_to_the_command_to_go_on(smat, monkeypatch):
    assert smat(*RUN_ONE)[0] == 0
    monkeypatch.setattr("smat.experiments.engine.run_all", lambda *_: iter(()))  # stopped at once
    _, _, err = smat(*RUN_ONE, "--again")
    assert "1 of 1 runs are left" in err
    assert "1 runs, 0 finished, 1 to make" in smat(*RUN_ONE)[2]


@pytest.mark.parametrize("command", ["list", "run", "status", "report"])
def test_help_has_examples(smat, command):
    status, out, _ = smat(command, "--help")
    assert status == 0
    assert "Example" in out
    assert f"smat {command}" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["run", "parrity"], "there is no experiment 'parrity'; known: "),
        (["run", "parity", "--preset", "fast"], "parity has no preset 'fast'; known: quick, slow"),
        (
            ["run", "parity", "--only", "broad"],
            "parity, preset quick, has no arm or cell 'broad'; arms: narrow, wide; cells: T=4, T=6",
        ),
        (
            ["run", "parity", "--device", "gpu"],
            "device is auto, cpu, cuda, cuda:N or mps, not 'gpu'",
        ),
        (["run", "parity", "--seeds", "a"], "seeds are whole numbers, as 0,1,2, not 'a'"),
        (["status", "parrity"], "there is no experiment 'parrity'; known: "),
    ],
    ids=["experiment", "preset", "arm", "device", "seeds", "status"],
)
def test_what_is_unknown_is_one_line_that_names_the_known(smat, tmp_path, arguments, line):
    status, out, err = smat(*arguments)
    assert (status, out) == (1, "")
    (error,) = (text for text in err.splitlines() if not text.startswith("parity, preset"))
    assert error.startswith(f"smat: error: {line}")
    assert list(tmp_path.iterdir()) == []


def test_report_says_where_the_page_is(smat, tmp_path):
    pytest.importorskip("matplotlib")
    status, out, err = smat("report")
    assert status == 0, err
    assert out.strip() == f"Report: {tmp_path / 'report.html'}"
    assert (tmp_path / "report.html").stat().st_size > 0
