"""The commands print what they promise, and an error is one line."""

import json

import pytest

import smat

pytest.importorskip("typer")

from smat.__main__ import main
from smat.console import WIDTH


def run(capsys, *arguments):
    """Run a command; return its exit status and what it printed."""
    status = main(arguments)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def geometry_rows(capsys, *arguments):
    status, out, err = run(capsys, "geometry", "--json", *arguments)
    assert (status, err) == (0, "")
    return {row["vc_dim"]: row for row in json.loads(out)["rows"]}


PAPER_CACHE = ["--heads", "1", "--key-dim", "32", "--value-dim", "32", "--batch", "64"]


def test_geometry_gives_the_cache_column_of_the_paper(capsys):
    rows = geometry_rows(capsys, "--seq-len", "262144", *PAPER_CACHE)
    assert [round(rows[d]["cache_bytes"] / 1e6) for d in (2, 3, 4)] == [99, 774, 3439]
    assert round(rows[1]["cache_bytes"] / 1e6, 1) == 0.5
    assert [rows[d]["field_size"] for d in (2, 3, 4)] == [367, 53, 23]

    rows = geometry_rows(capsys, "--seq-len", "1024", *PAPER_CACHE)
    assert round(rows[3]["cache_bytes"] / 1e6) == 36
    assert rows[3]["field_size"] == 11


def test_the_printed_table_holds_the_same_numbers(capsys):
    status, out, err = run(capsys, "geometry", "--seq-len", "262144", *PAPER_CACHE)
    assert (status, err) == (0, "")
    for number in ("0.5 MB", "99 MB", "774 MB", "3439 MB", "6,728,351", "584,545"):
        assert number in out


def test_no_number_is_cut_however_long(capsys):
    status, out, _ = run(capsys, "geometry", "--seq-len", "999999999999", "--vc-dim", "5")
    assert status == 0
    assert "499,999,999,936" in out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= WIDTH


def test_geometry_row_by_row(capsys):
    rows = geometry_rows(capsys, "--seq-len", "1024", "--vc-dim", "4", "--dtype", "bf16")
    assert rows == {
        4: {
            "vc_dim": 4,
            "field_size": 5,
            "num_profiles": 125,
            "num_types": 155,
            "num_distant": 512,
            "num_recent": 512,
            "guarantees_vc_dim": True,
            "additions_algorithm2": 31 * 125,
            "additions_factored": 2 * 5**4 + 5**3 + 5**3 + 5**2,
            "cache_states": 156,
            "cache_bytes": 156 * 32 * 33 * 2,
        }
    }


def test_geometry_says_where_the_vc_dimension_is_not_guaranteed(capsys):
    rows = geometry_rows(capsys, "--seq-len", "256")
    assert [rows[d]["guarantees_vc_dim"] for d in (1, 2, 3, 4)] == [True, True, True, False]


def test_a_length_without_a_distant_block_is_plain_linear_attention(capsys):
    row = geometry_rows(capsys, "--seq-len", "100", "--vc-dim", "3")[3]
    assert (row["num_distant"], row["num_recent"], row["cache_states"]) == (0, 100, 1)
    assert row["additions_factored"] == row["additions_algorithm2"] == 0


def test_without_a_length_the_vc_dimension_is_guaranteed(capsys, tmp_path):
    for options, length in (([], 128), (["--vc-dim", "2"], 64), (["--vc-dim", "4"], 1024)):
        status, printed, _ = run(capsys, "mask", *options, "--out", str(tmp_path / "mask.png"))
        assert status == 0
        assert f"T = {length}," in printed
        assert "not guaranteed" not in printed


def test_the_version_is_the_one_of_the_package(capsys):
    assert run(capsys, "--version") == (0, f"smat {smat.__version__}\n", "")


def test_recommend_takes_the_largest_d_that_is_proved_and_fits(capsys):
    status, out, err = run(capsys, "recommend", "--seq-len", "65536")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= WIDTH
    words = " ".join(out.split())
    assert "d = 3: the largest that is proved here and fits." in words
    assert "boundary=smat.schedules.window(8192)" in words
    assert "softmax attention is about as fast" not in words
    _, out, _ = run(capsys, "recommend", "--seq-len", "65536", "--memory", "30MB")
    assert "d = 2: the largest" in out
    _, out, _ = run(capsys, "recommend", "--seq-len", "65536", "--memory", "1GB")
    assert "d = 4: the largest" in out


def test_recommend_sends_short_sequences_to_softmax(capsys):
    _, out, _ = run(capsys, "recommend", "--seq-len", "1000", "--memory", "1.2 MB")
    assert "softmax attention is about as fast or faster" in " ".join(out.split())
    assert "d = 1: linear attention" in out


def test_mask_writes_a_picture_and_says_where(capsys, tmp_path):
    out = tmp_path / "new" / "mask.png"
    status, printed, err = run(
        capsys, "mask", "--seq-len", "64", "--vc-dim", "3", "--out", str(out)
    )
    assert (status, err) == (0, "")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert "n = 32" in printed, "the picture must have a distant block"
    assert str(out) in printed


@pytest.mark.parametrize(
    ("options", "described"),
    [
        (["--boundary", "none"], "n = 0"),
        (["--boundary", "kept", "--num-distant", "24"], "kept(24)"),
        (["--boundary", "rebuilt"], "rebuilt()"),
        (["--boundary", "doubling"], "doubling()"),
        (["--boundary", "window"], "window(step=16)"),
        (["--boundary", "window", "--window-step", "8"], "window(step=8)"),
        (["--field-size", "7", "--vc-dim", "2", "--vc-dim", "3"], "q = 7"),
    ],
)
def test_mask_draws_every_schedule(capsys, tmp_path, options, described):
    out = tmp_path / "mask.svg"
    status, printed, err = run(capsys, "mask", "--seq-len", "64", *options, "--out", str(out))
    assert (status, err) == (0, "")
    assert described in printed
    assert "<svg" in out.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["mask", "--seq-len", "0"], "0"),
        (["mask", "--vc-dim", "0"], "0"),
        (["mask", "--field-size", "4"], "4"),
        (["mask", "--seq-len", "100000"], "100000"),
        (["mask", "--out", "mask.txt"], "mask.txt"),
        (["mask", "--boundary", "kept"], "--num-distant"),
        (["mask", "--seq-len", "64", "--boundary", "kept", "--num-distant", "65"], "65"),
        (["mask", "--seq-len", "64", "--window-step", "8"], "--boundary window"),
        (["mask", "--seq-len", "64", "--num-distant", "8"], "--boundary kept"),
        (["geometry", "--seq-len", "-3"], "-3"),
        (["recommend", "--seq-len", "64", "--memory", "much"], "much"),
        (["recommend", "--seq-len", "9999", "--memory", "1kB"], "d = 1 keeps 0.3 MB"),
        (["geometry", "--heads", "0"], "heads"),
        (["geometry", "--chunk-size", "0"], "chunk_size"),
    ],
)
def test_bad_input_is_one_line_that_repeats_the_numbers(
    capsys, tmp_path, monkeypatch, arguments, said
):
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (1, "")
    assert err.startswith("smat: error: ")
    assert err.count("\n") == 1
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_is_no_traceback(capsys):
    status, _, err = run(capsys, "geometry", "--seq-len", "many")
    assert status == 2
    assert "--seq-len" in err
    assert "Traceback" not in err


def test_an_unknown_dtype_is_refused(capsys):
    status, _, err = run(capsys, "geometry", "--dtype", "int8")
    assert status == 2
    assert "int8" in err


@pytest.mark.parametrize("command", ["mask", "geometry"])
def test_help_shows_examples(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert "Examples" in out
    assert f"smat {command} --seq-len" in out
