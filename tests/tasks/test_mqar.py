"""MQAR has the distribution of the Zoology generator, and epochs of 707 steps."""

import itertools
import json
import time
from dataclasses import asdict

import numpy as np
import pytest
import torch

from smat.tasks.mqar import MQAR

LOADS = [(64, 4), (64, 16), (128, 32), (256, 64)]


def one_load(seq_len, num_pairs, num_examples=10_000, **fields):
    train, test = ((seq_len, num_pairs, num_examples),), ((seq_len, num_pairs),)
    return MQAR(train_loads=train, eval_loads=test, **fields)


def reference_gaps(num_examples, seq_len, num_pairs, power=0.01, seed=0):
    """Draw the gaps as the published generator does, one example at a time."""
    random = np.random.RandomState(seed)
    num_gaps = (seq_len - 2 * num_pairs) // 2
    odds = power * np.arange(1, num_gaps + 1) ** (power - 1)
    odds = odds / odds.sum()
    return np.stack(
        [
            random.choice(num_gaps, size=num_pairs, replace=False, p=odds)
            for _ in range(num_examples)
        ]
    ), odds


def gaps_by_pair(batch, num_pairs):
    """Recover g_i of the i-th pair from the rows and the values asked for there."""
    values = batch.inputs["token_ids"][:, 1 : 2 * num_pairs : 2]
    pair = (batch.targets[:, :, None] == values[:, None, :]).long().argmax(-1)
    gaps = (batch.rows - 2 * num_pairs) // 2
    return torch.empty_like(gaps).scatter_(1, pair, gaps)


@pytest.mark.parametrize(("seq_len", "num_pairs"), LOADS)
def test_keys_and_values_have_their_ranges_and_do_not_repeat(seq_len, num_pairs):
    batch = one_load(seq_len, num_pairs).train_batch(0, 512, 0)
    context = batch.inputs["token_ids"][:, : 2 * num_pairs]
    keys, values = context[:, 0::2], context[:, 1::2]
    assert keys.min() >= 1
    assert keys.max() <= 4095
    assert values.min() >= 4096
    assert values.max() <= 8191
    for drawn, low in ((keys, 1), (values, 4096)):
        assert all(len(set(row)) == num_pairs for row in drawn.tolist())
        # Uniform: the mean of many draws from 4,095 or 4,096 numbers.
        error = 4096 / 12**0.5 / drawn.numel() ** 0.5
        assert abs(drawn.double().mean().item() - (low + 2047.25)) < 5 * error


@pytest.mark.parametrize(("seq_len", "num_pairs"), LOADS)
def test_labels_stand_on_the_keys_of_the_second_part(seq_len, num_pairs):
    batch = one_load(seq_len, num_pairs).train_batch(1, 64, 0)
    for ids, rows, targets in zip(
        batch.inputs["token_ids"].tolist(), batch.rows.tolist(), batch.targets.tolist(), strict=True
    ):
        value_of = dict(zip(ids[0 : 2 * num_pairs : 2], ids[1 : 2 * num_pairs : 2], strict=True))
        assert rows == sorted(set(rows))
        assert rows[0] >= 2 * num_pairs
        assert rows[-1] < seq_len
        assert all(row % 2 == 0 for row in rows)
        assert sorted(ids[row] for row in rows) == sorted(value_of)  # every key once
        assert [value_of[ids[row]] for row in rows] == targets


def test_no_value_follows_its_query():
    plain = one_load(64, 8, random_fillers=False).train_batch(0, 200, 0)
    ids, rows = plain.inputs["token_ids"], plain.rows
    second = ids[:, 16:].clone()
    assert second.scatter(1, rows - 16, 0).eq(0).all()
    filled = one_load(64, 8).train_batch(0, 1000, 0)
    ids, rows = filled.inputs["token_ids"], filled.rows
    behind = ids.gather(1, rows + 1)
    assert (behind == filled.targets).double().mean() < 0.005  # chance: 1 / 8192


def test_fillers_are_uniform_over_the_whole_vocabulary():
    batch = one_load(64, 4, vocab_size=64).train_batch(0, 2000, 0)
    ids = batch.inputs["token_ids"]
    is_filler = torch.ones_like(ids, dtype=torch.bool).scatter_(1, batch.rows, False)
    is_filler[:, :8] = False
    counts = torch.bincount(ids[is_filler], minlength=64).double()
    assert counts.sum() == 2000 * 52
    expected = counts.sum() / 64
    assert ((counts - expected) ** 2 / expected).sum() < 63 + 5 * (2 * 63) ** 0.5


@pytest.mark.parametrize(("seq_len", "num_pairs"), [(32, 2), (32, 4), (64, 8)])
def test_the_gap_law_is_that_of_the_reference(seq_len, num_pairs):
    num_examples = 10_000
    task = one_load(seq_len, num_pairs, num_examples)
    ours = gaps_by_pair(task.train_batch(0, num_examples, 0), num_pairs).numpy()
    theirs, odds = reference_gaps(num_examples, seq_len, num_pairs)

    first = np.bincount(ours[:, 0], minlength=len(odds))
    expected = num_examples * odds
    freedom = len(odds) - 1
    assert ((first - expected) ** 2 / expected).sum() < freedom + 5 * (2 * freedom) ** 0.5

    # Two samples, the joint law of the first and the last gap: order matters, not the set alone.
    def table(gaps):
        return np.bincount(gaps[:, 0] * len(odds) + gaps[:, -1], minlength=len(odds) ** 2)

    one, two = table(ours), table(theirs)
    filled = one + two >= 10
    statistic = ((one - two)[filled] ** 2 / (one + two)[filled]).sum()
    freedom = filled.sum() - 1
    assert freedom > 20
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_the_gap_law_is_exact_where_all_outcomes_can_be_listed():
    task = one_load(20, 3, 100_000, power=0.5)  # 7 gaps, 210 ordered outcomes
    gaps = gaps_by_pair(task.train_batch(0, 100_000, 0), 3)
    odds = np.arange(1, 8) ** -0.5
    odds /= odds.sum()
    counts = np.bincount((gaps @ torch.tensor([49, 7, 1])).numpy(), minlength=343)
    statistic = 0.0
    for a, b, c in itertools.permutations(range(7), 3):
        probability = odds[a] * odds[b] / (1 - odds[a]) * odds[c] / (1 - odds[a] - odds[b])
        expected = 100_000 * probability
        statistic += (counts[49 * a + 7 * b + c] - expected) ** 2 / expected
    assert statistic < 209 + 5 * (2 * 209) ** 0.5


def test_an_epoch_has_707_steps_and_repeats_its_examples():
    task = MQAR()
    assert task.steps_per_epoch(256) == 707
    shapes = [
        tuple(task.train_batch(step, 256, 0).inputs["token_ids"].shape)
        for step in (0, 390, 391, 706)
    ]
    assert shapes == [(256, 64), (160, 64), (256, 128), (32, 256)]
    for step in (0, 500):
        first, again = task.train_batch(step, 256, 0), task.train_batch(step + 707, 256, 0)
        assert torch.equal(first.inputs["token_ids"], again.inputs["token_ids"])
        assert torch.equal(first.targets, again.targets)
    other = task.train_batch(1, 256, 0).inputs["token_ids"]
    assert not torch.equal(task.train_batch(0, 256, 0).inputs["token_ids"], other)


def test_shuffled_epochs_hold_the_same_examples_in_another_order():
    task = MQAR(train_loads=((16, 2, 40), (32, 4, 24)), shuffle_batches=True)
    num_steps = task.steps_per_epoch(8)
    assert num_steps == 8
    epochs = []
    for epoch in range(2):
        steps = range(epoch * num_steps, (epoch + 1) * num_steps)
        batches = [task.train_batch(step, 8, 5) for step in steps]
        epochs.append([str(batch.inputs["token_ids"].tolist()) for batch in batches])
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
    plain = MQAR(train_loads=((16, 2, 40), (32, 4, 24)))
    in_order = [
        str(plain.train_batch(step, 8, 5).inputs["token_ids"].tolist()) for step in range(8)
    ]
    assert sorted(in_order) == sorted(epochs[0])


def test_held_out_examples_do_not_depend_on_the_batch_size():
    small = list(MQAR(num_eval=50, eval_batch_size=7).eval_batches(0))
    large = list(MQAR(num_eval=50, eval_batch_size=50).eval_batches(0))
    cells = ["T=64,N=4", "T=64,N=8", "T=64,N=16", "T=128,N=32", "T=256,N=64"]
    assert [batch.cell for batch in large] == cells
    for batch in large:
        parts = [part for part in small if part.cell == batch.cell]
        assert [len(part.rows) for part in parts] == [7] * 7 + [1]
        joined = torch.cat([part.inputs["token_ids"] for part in parts])
        assert torch.equal(joined, batch.inputs["token_ids"])
    validation = next(MQAR(num_eval=50, eval_batch_size=50).eval_batches(0, "validation"))
    assert not torch.equal(validation.targets, large[0].targets)
    assert sum(len(batch.rows) for batch in MQAR().eval_batches(0)) == 5000


def test_loss_and_score():
    task = one_load(16, 2, vocab_size=32)
    batch = task.train_batch(0, 3, 0)
    outputs = torch.nn.functional.one_hot(batch.targets, 32) * 100.0
    assert task.loss(outputs, batch) < 1e-6
    assert task.score(outputs, batch).tolist() == [1, 1, 1]
    outputs[1, 0] = 0.0
    outputs[1, 0, 3] = 1.0
    assert task.score(outputs, batch).tolist() == [1, 0.5, 1]
    assert task.loss(torch.zeros(3, 2, 32), batch).item() == pytest.approx(np.log(32), rel=1e-6)


def test_controls_say_how_many_queries_lie_behind_the_middle():
    controls = MQAR().controls()
    shares = {"64,N=4": 25, "64,N=8": 41, "64,N=16": 100, "128,N=32": 100, "256,N=64": 100}
    for load, share in shares.items():
        assert controls[f"queries in the second half, T={load}"] == pytest.approx(share, abs=0.6)
    assert controls["a random value"] == pytest.approx(100 / 4096)
    assert controls["a random value of the context"] == pytest.approx(
        20 * (1 / 4 + 1 / 8 + 1 / 16 + 1 / 32 + 1 / 64)
    )
    # Against the reference, at the load where the share is neither 0 nor 1.
    gaps, _ = reference_gaps(8_000, 64, 8)
    theirs = 100 * (16 + 2 * gaps >= 32).mean()
    assert controls["queries in the second half, T=64,N=8"] == pytest.approx(theirs, abs=1.0)


def test_a_task_survives_json():
    task = MQAR(vocab_size=512, train_loads=((64, 4, 100),), eval_loads=((64, 4),))
    assert MQAR(**json.loads(json.dumps(asdict(task)))) == task
    assert hash(task) == hash(MQAR(**json.loads(json.dumps(asdict(task)))))
    assert task.max_length == 64
    assert task.num_outputs == 512
    assert "512 tokens" in task.describe()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train_loads": ((64, 17, 10),)}, "T = 64 and N = 17"),
        ({"eval_loads": ((8, 0),)}, "T = 8 and N = 0"),
        ({"vocab_size": 16}, "vocab_size = 16 has 7 keys.*N = 8"),
    ],
)
def test_a_load_that_does_not_fit_is_refused_with_its_numbers(fields, message):
    with pytest.raises(ValueError, match=message):
        MQAR(**fields)


@pytest.mark.parametrize(("step", "seq_len"), [(0, 64), (391, 128), (470, 256), (700, 256)])
def test_a_million_tokens_a_second_on_one_core(step, seq_len):
    task, threads = MQAR(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        fastest = min(timed(task, step) for _ in range(10))
    finally:
        torch.set_num_threads(threads)
    assert 256 * seq_len / fastest > 1e6


def timed(task, step):
    start = time.perf_counter()
    task.train_batch(step, 256, 0)
    return time.perf_counter() - start
