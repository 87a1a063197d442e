"""Excerpts of books: targets, order, bins of positions, units, and what runs rest on."""

import math

import pytest
import torch

from smat.data.shards import open_split
from smat.tasks import LanguageModelling
from smat.tasks.language_modelling import excerpt_order

SMALL = {"seq_len": 64, "eval_length": 256, "bins": (0, 32, 64, 256), "num_eval": 5}


@pytest.fixture
def text(prepared):
    found = open_split(prepared / "bytes", "train")
    return found.read(0, len(found))


def test_targets_are_the_next_tokens(text):
    task = LanguageModelling(**SMALL)
    batch = task.train_batch(3, 4, seed=1)
    count = (len(text) - 1) // 64
    numbers = excerpt_order(count, 1, 0)[12:16].tolist()
    for row, number in enumerate(numbers):
        start = 64 * number
        assert batch.inputs["token_ids"][row].tolist() == text[start : start + 64].tolist()
        assert batch.targets[row].tolist() == text[start + 1 : start + 65].tolist()
    assert batch.inputs["targets"] is batch.targets
    assert batch.rows.shape == (4, 64)


def test_an_epoch_takes_every_excerpt_once_and_the_next_in_another_order(text):
    task = LanguageModelling(**SMALL)
    count = (len(text) - 1) // 64
    taken = torch.cat(
        [task.train_batch(step, 7, seed=0).inputs["token_ids"] for step in range(count)]
    )
    excerpts = text[: 64 * count].view(count, 64)
    for epoch in range(3):
        seen = taken[epoch * count : (epoch + 1) * count]
        assert torch.equal(seen, excerpts[excerpt_order(count, 0, epoch)])
    assert sorted(excerpt_order(count, 0, 1).tolist()) == list(range(count))
    assert not torch.equal(excerpt_order(count, 0, 0), excerpt_order(count, 0, 1))
    assert not torch.equal(excerpt_order(count, 0, 0), excerpt_order(count, 1, 0))


def test_evaluation_is_spread_over_the_split_and_the_same_for_all_seeds(prepared):
    task = LanguageModelling(**SMALL)
    first, again = ([b.targets for b in task.eval_batches(seed)] for seed in (0, 1))
    assert all(map(torch.equal, first, again))
    found = open_split(prepared / "bytes", "test")
    count = found.num_excerpts(256)
    expected = found.excerpts([place * count // 5 for place in range(5)], 256)
    assert torch.equal(torch.cat(first), expected[:, 1:])
    validation = torch.cat([b.targets for b in task.eval_batches(0, "validation")])
    assert validation.shape == (64, 64)
    everything = LanguageModelling(**SMALL | {"num_eval": 10**6})
    assert sum(len(b.rows) for b in everything.eval_batches(0)) == count
    with pytest.raises(ValueError, match="split must be one of"):
        next(task.eval_batches(0, "train"))


def test_bins_hold_the_losses_of_their_positions():
    task = LanguageModelling(**SMALL)
    losses = torch.arange(256.0).expand(2, 256)
    scores = task.scores(losses, None)
    assert list(scores) == task.cells == ["[0,32)", "[32,64)", "[64,256)"]
    assert [score.mean().item() for score in scores.values()] == [15.5, 47.5, 159.5]
    assert list(task.scores(losses[:, :64], None)) == ["T=64"]


def test_units():
    means = {"x": 2.0}
    bits = LanguageModelling(**SMALL)
    assert bits.values(means)["x"] == pytest.approx(2 / math.log(2))
    for unit, value in (("nats", 2.0), ("perplexity", math.exp(2.0))):
        task = LanguageModelling("gpt2", 50_257, 64, 64, unit=unit)
        assert task.values(means) == {"x": pytest.approx(value)}
        assert (task.unit, task.cells) == (unit, ["T=64"])


def test_controls_are_in_the_unit(prepared):
    controls = LanguageModelling(**SMALL).controls()
    assert controls["every token equally likely"] == pytest.approx(8)
    assert 2 < controls["frequencies of the training books"] < 5


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokens": "gpt2"}, "bits per byte are for bytes, not for tokens 'gpt2'"),
        (
            {"bins": (0, 64, 32)},
            r"bins must rise from 0 to 256 at most, but they are \(0, 64, 32\)",
        ),
        ({"bins": (0, 64, 512)}, "bins must rise"),
        ({"scored_split": "train"}, "split must be one of"),
    ],
)
def test_what_does_not_fit_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        LanguageModelling(**SMALL | options)


def test_wrong_tokens_and_short_text_are_refused(prepared, monkeypatch):
    with pytest.raises(
        ValueError, match="a vocabulary of 300 tokens, but this run is for one of 9"
    ):
        LanguageModelling("bpe300", 9, unit="nats").source()
    with pytest.raises(ValueError, match=r"tokens, but an excerpt of 10000000 needs 10000001"):
        LanguageModelling(seq_len=10**7).train_batch(0, 1, 0)
    assert LanguageModelling().source() != LanguageModelling("bpe300", 300, unit="nats").source()
    monkeypatch.delenv("SMAT_DATA")
    with pytest.raises(ValueError, match="this needs text as tokens"):
        LanguageModelling().source()
