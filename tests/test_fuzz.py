"""The fuzzer: fixed seeds find nothing, a planted bug is found and shrunk, a run goes on."""

import pytest
import torch

import smat
from tests.fuzz import runner
from tests.fuzz.__main__ import main
from tests.fuzz.choices import Choices, shrink


@pytest.mark.parametrize("first", range(0, 2400, 400))
def test_a_minute_of_fixed_seeds_finds_nothing(first):
    report = runner.run(first, count=400)
    assert report.counts.total() == 400
    assert report.failures == [], "\n".join(map(str, report.failures))


@pytest.mark.slow
def test_twenty_minutes_find_nothing():
    report = runner.run(1_000_000, seconds=20 * 60)
    assert report.counts.total() > 1000
    assert report.failures == [], "\n".join(map(str, report.failures))


def test_the_simplest_choices_are_kept_apart_from_those_that_matter():
    def draw(choices):
        length, word = choices.pick("length", range(200)), choices.pick("word", ["a", "b", "c"])
        choices.pick("unused", range(1000))
        return length >= 37 and word != "a"

    def fails(given):
        choices = Choices(given=given)
        return choices if draw(choices) else None

    failed = next(c for c in map(Choices, range(100)) if draw(c))
    assert shrink(fails, failed) == {"length": 37, "word": "b"}


def test_a_planted_bug_is_found_and_shrunk(monkeypatch):
    right = smat.smat_attention

    def wrong(q, k, v, mask, log_decay=None, **options):
        """Forget nothing before the seventh token."""
        if log_decay is not None:
            log_decay = torch.cat([torch.zeros_like(log_decay[:, :6]), log_decay[:, 6:]], 1)
        return right(q, k, v, mask, log_decay=log_decay, **options)

    monkeypatch.setattr(smat, "smat_attention", wrong)
    found = (runner.run_seed(seed, "attention") for seed in range(200))
    failure = next(each for each in found if each is not None)
    assert failure.given == {"seq_len": 2, "gates": "mild"}
    with pytest.raises(AssertionError, match="relative RMS"):
        runner.check(failure.kind, **failure.given)
    assert "check('attention', **{'seq_len': 2" in str(failure)
    monkeypatch.undo()
    runner.check(failure.kind, **failure.given)


def test_an_error_that_does_not_say_what_was_given_is_a_failure(monkeypatch):
    def silent(*_):
        raise ValueError("something is wrong")

    monkeypatch.setattr("smat.ops.smat.arguments.check_tensor", silent)
    with pytest.raises(AssertionError, match="does not say what was given"):
        runner.check("malformed", argument="k", breakage="word")
    monkeypatch.undo()
    runner.check("malformed", argument="k", breakage="word")


def test_an_input_taken_in_silence_is_a_failure(monkeypatch):
    broken = {"target": "attention", "argument": "log_decay", "breakage": 0.25}
    runner.check("malformed", **broken)
    monkeypatch.setattr("smat.ops.smat.arguments.check_gate_values", lambda *_: None)
    with pytest.raises(AssertionError, match=r"log_decay.*in silence"):
        runner.check("malformed", **broken)


def test_what_hangs_is_a_failure(monkeypatch):
    monkeypatch.setattr(runner, "LONGEST", 1)

    def hang(choices):
        while True:
            pass

    with pytest.raises(TimeoutError, match="within 1 s"):
        runner.run_case(hang, Choices())


def test_the_command_notes_its_last_seed_and_goes_on_behind_it(tmp_path, capsys):
    note = tmp_path / "deeper" / "seed"
    assert main(["--count", "10", "--from", "20", "--note", str(note)]) == 0
    closing = "7 configurations, 3 malformed inputs, 0 failures"
    assert capsys.readouterr().out.splitlines()[-1] == closing
    assert note.read_text() == "29\n"
    assert main(["--count", "1", "--from", "last", "--note", str(note)]) == 0
    assert "seeds from 30" in capsys.readouterr().out
    assert note.read_text() == "30\n"
    with pytest.raises(SystemExit):
        main([])
    assert "--seconds" in capsys.readouterr().err
