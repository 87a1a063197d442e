"""Joint recall: records and queries in their halves, and what one field of a query is worth."""

import json
import math
from collections import Counter
from dataclasses import asdict
from fractions import Fraction

import pytest
import torch

from smat.tasks.joint_recall import JointRecall, sequence_length

LOADS = [(1, 4), (2, 8), (8, 16), (16, 16), (32, 16), (4, 8)]


@pytest.mark.parametrize("load", LOADS, ids=str)
def test_looking_records_up_gives_the_targets(load):
    contexts, keys = load
    task = JointRecall(loads=(load,))
    batch = task.train_batch(2, 6, seed=3)
    half = sequence_length(*load) // 2
    count = contexts * keys
    for ids, rows, targets in zip(
        batch.inputs["token_ids"].tolist(), batch.rows.tolist(), batch.targets.tolist(), strict=True
    ):
        first, second = ids[:half], ids[half:]
        assert first[0] == 1
        assert second[0] == 2
        records = [tuple(first[1 + 3 * i : 4 + 3 * i]) for i in range(count)]
        queries = [tuple(second[1 + 3 * i : 4 + 3 * i]) for i in range(count)]
        assert not any(first[1 + 3 * count :])
        assert not any(second[1 + 3 * count :])
        value_of = {(context, key): value for context, key, value in records}
        assert len(value_of) == count
        assert {context for context, _ in value_of} <= set(range(3, 35))
        assert {key for _, key in value_of} <= set(range(35, 547))
        assert set(value_of.values()) <= set(range(547, 563))
        # Every context has the same keys, and each pair is asked once, its answer left out.
        assert len({context for context, _ in value_of}) == contexts
        assert len({key for _, key in value_of}) == keys
        assert sorted(query[:2] for query in queries) == sorted(value_of)
        assert {query[2] for query in queries} == {0}
        assert rows == [half + 2 + 3 * i for i in range(count)]
        assert targets == [value_of[query[:2]] for query in queries]
        assert count < 10 or [query[:2] for query in queries] != [r[:2] for r in records]


def test_sizes_of_the_paper():
    task = JointRecall()
    assert task.vocab_size == task.num_outputs == 563
    assert task.max_length == 3076
    assert [sequence_length(*load) for load in task.loads] == [64, 100, 772, 1540, 3076]
    assert task.steps_per_epoch(256) == 705
    assert 32 * 705 == 22_560


def test_values_are_uniform_and_records_are_shuffled():
    task = JointRecall(loads=((2, 8),))
    batch = task.train_batch(0, 4000, 0)
    counts = torch.bincount(batch.targets.flatten() - 547, minlength=16).double()
    expected = counts.sum() / 16
    assert ((counts - expected) ** 2 / expected).sum() < 15 + 5 * (2 * 15) ** 0.5
    # The first record's context comes first or second among the two with equal odds.
    ids = batch.inputs["token_ids"]
    same = (ids[:, 1] == ids[:, 4]).double().mean().item()
    assert same == pytest.approx(7 / 15, abs=4 * (0.25 / 4000) ** 0.5)


def test_splits_have_their_sizes_and_do_not_share_examples():
    task = JointRecall(loads=((1, 4), (2, 8)), num_validation=50, num_test=70)
    for split, size in (("validation", 50), ("test", 70)):
        sizes = Counter()
        for batch in task.eval_batches(0, split):
            sizes[batch.cell] += len(batch.rows)
        assert sizes == {"C=1,K=4": size, "C=2,K=8": size}
    test, validation = next(task.eval_batches(0)), next(task.eval_batches(0, "validation"))
    assert not torch.equal(test.inputs["token_ids"], validation.inputs["token_ids"])
    with pytest.raises(ValueError, match="'train'"):
        next(task.eval_batches(0, "train"))
    assert (JointRecall().num_train, JointRecall().num_validation) == (36_000, 2_000)
    assert JointRecall().num_test == 4_000


def test_epochs_repeat_their_examples_and_mix_no_loads():
    task = JointRecall(loads=((1, 4), (2, 8)), num_train=20)
    assert task.steps_per_epoch(8) == 6
    epochs = []
    for epoch in range(2):
        batches = [task.train_batch(step, 8, 0) for step in range(6 * epoch, 6 * epoch + 6)]
        assert Counter(batch.cell for batch in batches) == {"C=1,K=4": 3, "C=2,K=8": 3}
        assert sorted(len(batch.rows) for batch in batches) == [4, 4, 8, 8, 8, 8]
        epochs.append(sorted(str(batch.inputs["token_ids"].tolist()) for batch in batches))
    assert epochs[0] == epochs[1]
    assert len(set(epochs[0])) == 6


def expected_majority(num_records, num_values=16):
    """The mean share of the commonest of uniform values, exactly.

    P(no value occurs more than m times) = n! [x^n] (sum over i <= m of x^i / i!)^V / V^n.
    """
    mean = Fraction(num_records)
    for most in range(1, num_records):
        factor = [Fraction(1, math.factorial(i)) for i in range(most + 1)]
        power = [Fraction(1)]
        for _ in range(num_values):
            product = [Fraction(0)] * min(len(power) + most, num_records + 1)
            for i, a in enumerate(power):
                for j, b in enumerate(factor[: len(product) - i]):
                    product[i + j] += a * b
            power = product
        ways = power[num_records] if len(power) > num_records else Fraction(0)
        mean -= ways * math.factorial(num_records) / Fraction(num_values) ** num_records
    return float(mean / num_records)


def test_the_exact_share_of_a_majority_is_right_where_it_can_be_listed():
    assert expected_majority(1) == 1
    assert expected_majority(2) == pytest.approx((1 / 16) * 1 + (15 / 16) * 0.5)


def test_single_field_majorities():
    controls = JointRecall().controls()
    best = [controls[f"best single-field majority, C={C},K={K}"] for C, K in LOADS[:5]]
    assert best == pytest.approx([100, 53.2, 25.8, 19.9, 19.2], abs=0.15)
    assert controls["best single-field majority"] == pytest.approx(sum(best) / 5)
    assert controls["a random value"] == 6.25
    # The better of two fields is at least either; where one field is far ahead it decides alone.
    assert best[1] == pytest.approx(100 * expected_majority(2), abs=0.3)
    assert best[2] == pytest.approx(100 * expected_majority(8), abs=0.3)
    assert best[3] > 100 * expected_majority(16)
    assert best[4] == pytest.approx(100 * expected_majority(16), abs=0.1)


def test_the_majority_of_the_control_is_what_a_majority_answer_scores():
    task = JointRecall(loads=((2, 8),))
    batch = task.train_batch(0, 2000, 0)
    scores = []
    for ids, rows, targets in zip(
        batch.inputs["token_ids"].tolist(), batch.rows.tolist(), batch.targets.tolist(), strict=True
    ):
        records = [ids[1 + 3 * i : 4 + 3 * i] for i in range(16)]
        by_field = []
        for field in (0, 1):
            right = 0
            for row, target in zip(rows, targets, strict=True):
                asked = ids[row - 1 + field]
                common = Counter(record[2] for record in records if record[field] == asked)
                right += common.most_common(1)[0][0] == target
            by_field.append(right / 16)
        scores.append(max(by_field))
    share = 100 * sum(scores) / len(scores)
    assert task.controls()["best single-field majority, C=2,K=8"] == pytest.approx(share, abs=0.6)


def test_loss_and_score():
    task = JointRecall(loads=((1, 4),))
    batch = task.train_batch(0, 2, 0)
    outputs = torch.nn.functional.one_hot(batch.targets, 563) * 100.0
    assert task.loss(outputs, batch) < 1e-6
    outputs[1, 2] = 0.0
    assert task.score(outputs, batch).tolist() == [1, 0.75]


def test_a_task_survives_json_and_describes_itself():
    task = JointRecall(loads=((1, 4), (4, 8)), num_train=100)
    assert JointRecall(**json.loads(json.dumps(asdict(task)))) == task
    assert "(4, 8) at length 196" in task.describe()


@pytest.mark.parametrize("load", [(33, 4), (0, 4), (1, 513)], ids=str)
def test_a_load_that_does_not_fit_is_refused_with_its_numbers(load):
    with pytest.raises(ValueError, match=rf"32 contexts and 1 to 512 keys.*\({load[0]}, {load[1]}"):
        JointRecall(loads=(load,))
