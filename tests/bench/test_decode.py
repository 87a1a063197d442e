"""Decoders are checked, packed by memory, filled to the right place and timed in turns."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import smat

pytest.importorskip("pydantic")
pytest.importorskip("rich")

from smat.bench.config import DecodeConfig
from smat.bench.decode import Decoder, plan_packs, run_decode

SMALL = DecodeConfig(
    contexts=(64, 128), vc_dims=(1, 2, 3), batches=(1, 2), heads=2, key_dim=4, value_dim=4,
    chunk_size=8, steps=12, window_steps=40, passes=2,
)  # fmt: skip


def test_result_has_every_decoder_at_every_context():
    result = json.loads(json.dumps(run_decode(SMALL)))
    assert result["benchmark"] == "decode"
    assert all(check["error"] <= check["tolerance"] for check in result["checks"])
    found = {(row["batch"], row["context"], row["name"]) for row in result["rows"]}
    names = {"d=1", "d=2", "d=3", "d=2 window", "d=3 window", "softmax"}
    assert found == {(b, c, name) for b in (1, 2) for c in (64, 128) for name in names}
    assert len(result["rows"]) == len(found)
    assert result["skipped"] == []
    for row in result["rows"]:
        assert (row["slowest_to_median"] is None) == (row["kind"] != "window")
        assert row["softmax_ratio"] > 0
        if row["context"] == 64:
            assert row["ratio_to_shortest"] == 1


def test_cache_bytes_are_those_of_the_state():
    rows = run_decode(SMALL)["rows"]
    by_name = {(row["name"], row["context"], row["batch"]): row["cache_bytes"] for row in rows}
    per_state = 4 * 2 * 4 * 5  # fp32, two heads, r = 4, p = 5
    geometry = smat.SMatMask(128 + SMALL.steps, 3, chunk_size=8).geometry
    assert by_name["d=1", 64, 1] == by_name["d=1", 128, 1] == per_state
    assert by_name["d=3", 128, 1] == per_state * (geometry.num_types + 1)
    assert by_name["d=3", 128, 2] == 2 * by_name["d=3", 128, 1]
    assert by_name["softmax", 128, 1] == 4 * 2 * (128 + SMALL.steps) * 8


@pytest.mark.parametrize("context", [64, 128, 131])
@pytest.mark.parametrize("kind", ["fixed", "window"])
def test_states_are_filled_up_to_the_steps(kind, context):
    decoder = Decoder(SMALL, kind, 3, context, batch=2)
    state = decoder.fill_state()
    (position,) = set(state.positions)
    assert len(state) == 2
    if kind == "fixed":
        assert position == context
        assert position + SMALL.steps == state.mask.seq_len
    else:
        step = context // 4
        move = 4 * step
        assert position <= move < position + decoder.num_steps


def test_a_window_is_filled_with_its_next_table_on_the_way():
    config = DecodeConfig(heads=2, key_dim=16, value_dim=16, steps=8, window_steps=64)
    state = Decoder(config, "window", 4, 2048, batch=2).fill_state()
    assert state.positions == [2048 - 32] * 2
    decoded = Decoder(config, "window", 4, 2048, batch=1).fill_state()
    assert state.built == 2 * decoded.built
    assert state.built[0] > 0


def test_a_step_moves_the_state_on():
    step, _ = Decoder(SMALL, "window", 2, 64, batch=1).stepper()
    outs = torch.stack([step() for _ in range(40)])
    assert outs.isfinite().all()
    assert not torch.equal(outs[0], outs[32])  # the same token, another state


def test_what_does_not_fit_together_is_timed_apart_and_what_never_fits_is_left_out():
    all_in_one, _ = plan_packs(SMALL, math.inf)
    assert len(all_in_one) == 4
    largest = Decoder(SMALL, "window", 3, 128, 2).expected_bytes
    shortest = Decoder(SMALL, "window", 3, 64, 2).expected_bytes
    packs, skipped = plan_packs(SMALL, largest + shortest)
    assert len(packs) > 4
    assert skipped == []
    for pack in packs:
        assert {replace(member, context=64) for member in pack} <= set(pack)
        assert sum(member.expected_bytes for member in pack) <= largest + shortest
    _, skipped = plan_packs(SMALL, largest)
    assert {
        "name": "d=3 window",
        "batch": 2,
        "context": 128,
        "bytes": largest + shortest,
    } in skipped


def test_a_command_that_may_use_no_memory_says_that_nothing_was_timed(capsys, tmp_path):
    pytest.importorskip("typer")
    from smat.__main__ import main

    options = ["--context", "64", "--max-gb", "0", "--json-out", str(tmp_path / "r.json")]
    assert main(["bench", "decode", *options]) == 1
    assert "the benchmark timed nothing" in capsys.readouterr().err


def test_a_wrong_step_is_not_timed(monkeypatch):
    right = smat.smat_attention

    class Wrong:
        def __init__(self, state):
            self.state = state

        def step(self, q, k, v, inplace):
            out, _ = self.state.step(q, k, v, inplace=inplace)
            return out * 1.01, self

    def broken(*args, **options):
        out, state = right(*args, **options)
        return out, Wrong(state)

    monkeypatch.setattr(smat, "smat_attention", broken)
    with pytest.raises(ValueError, match=r"d=1: the output at T = 149.*nothing was timed"):
        run_decode(SMALL)


def test_the_command_prints_writes_and_draws(capsys, tmp_path):
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    from smat.__main__ import main

    paths = SimpleNamespace(json=tmp_path / "r.json", figure=tmp_path / "f.png")
    status = main(
        [
            "bench", "decode", "--context", "32", "--context", "64", "--vc-dim", "2", "--batch",
            "1", "--heads", "1", "--key-dim", "4", "--value-dim", "4", "--chunk-size", "8",
            "--steps", "8", "--passes", "1", "--window-steps", "16",
            "--json-out", str(paths.json), "--figure-out", str(paths.figure),
        ]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "d=2 window" in printed.out
    assert "…" not in printed.out
    assert len(json.loads(paths.json.read_text())["rows"]) == 6
    assert paths.figure.stat().st_size > 1000
