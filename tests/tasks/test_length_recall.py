"""Length recall: both layouts, their laws, and which pairs lie behind which boundary."""

import itertools
import json
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from smat.layers import CallInfo, HashedRouting
from smat.masks import SMatMask, TokenHash
from smat.tasks.length_recall import LengthRecall, uniform_layout

SMALL = {
    "seq_len": 64, "num_pairs": 8, "eval_lengths": (64, 256), "placed_length": 256,
    "gaps": (0, 16, 200), "region": 24, "num_eval": 10, "eval_batch_size": 4,
}  # fmt: skip


def check_examples(task, batch):
    """Look every query up one token at a time."""
    for ids, rows, targets in zip(
        batch.inputs["token_ids"].tolist(), batch.rows.tolist(), batch.targets.tolist(), strict=True
    ):
        keys = [place for place, token in enumerate(ids) if token < 256]
        values = [place for place, token in enumerate(ids) if 256 <= token < 512]
        assert len(keys) == 2 * task.num_pairs
        assert sorted(Counter(ids[place] for place in keys).values()) == [2] * task.num_pairs
        pairs = [place for place in keys if place not in rows]
        assert [place + 1 for place in pairs] == values
        value_of = {ids[place]: ids[place + 1] for place in pairs}
        place_of = {ids[place]: place for place in pairs}
        assert len(set(value_of.values())) == task.num_pairs
        assert rows == sorted(rows)
        assert all(place_of[ids[row]] + 1 < row for row in rows)
        assert [value_of[ids[row]] for row in rows] == targets


def test_looking_keys_up_gives_the_targets():
    task = LengthRecall()
    assert task.vocab_size == task.num_outputs == 768
    assert task.max_length == 8192
    batch = task.train_batch(4, 16, 0)
    assert batch.inputs["token_ids"].shape == (16, 1024)
    check_examples(task, batch)
    small = LengthRecall(**SMALL)
    for batch in small.eval_batches(1):
        check_examples(small, batch)


def test_every_arrangement_of_the_uniform_layout_is_equally_likely():
    length, num_rows = 8, 60_000
    layout = uniform_layout(num_rows, 2, length, torch.Generator().manual_seed(0))
    found = Counter(map(tuple, torch.cat(layout, 1).tolist()))
    arrangements = [
        (*keys, *queries)
        for keys in itertools.permutations(range(length), 2)
        for queries in itertools.permutations(range(length), 2)
        if len({keys[0], keys[0] + 1, keys[1], keys[1] + 1, *queries}) == 6
        and all(key + 1 < query for key, query in zip(keys, queries, strict=True))
    ]
    assert set(found) == set(arrangements)
    expected = num_rows / len(arrangements)
    statistic = sum((found[each] - expected) ** 2 / expected for each in arrangements)
    freedom = len(arrangements) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("gap", [0, 256, 1024, 3072, 7678])
def test_placed_regions(gap):
    task = LengthRecall(gaps=(gap,), eval_lengths=(1024,), num_eval=6)
    (batch,) = [batch for batch in task.eval_batches(0) if batch.cell == f"D={gap}"]
    ids = batch.inputs["token_ids"]
    assert ids.shape == (6, 8192)
    check_examples(task, batch)
    assert batch.rows.min() >= 7936
    taken = (ids < 512).nonzero()[:, 1]
    taken = taken[taken < 7936]
    assert taken.min() >= 7680 - gap
    assert taken.max() < 7936 - gap
    # Pairs and queries come in unrelated orders.
    values = ids[ids.ge(256) & ids.lt(512)].view(6, 64)
    assert not torch.equal(values, batch.targets)


def test_cells_and_sizes():
    task = LengthRecall(**SMALL)
    sizes = Counter()
    for batch in task.eval_batches(0):
        sizes[batch.cell] += len(batch.rows)
        assert len(batch.rows) <= 4
    assert sizes == dict.fromkeys(["T=64", "T=256", "D=0", "D=16", "D=200"], 10)
    assert {batch.cell for batch in task.eval_batches(0, "validation")} == {"T=64"}
    test, validation = next(task.eval_batches(0)), next(task.eval_batches(0, "validation"))
    assert not torch.equal(test.targets, validation.targets)
    assert task.steps_per_epoch(32) is None
    cells = {batch.cell for batch in LengthRecall(num_eval=1).eval_batches(0)}
    assert cells == {"T=1024", "T=2048", "T=4096", "T=8192"} | {
        "D=0", "D=256", "D=1024", "D=3072", "D=7678"
    }  # fmt: skip


def test_batches_are_functions_of_their_arguments():
    task = LengthRecall(**SMALL)
    first, again = task.train_batch(7, 4, 1), task.train_batch(7, 4, 1)
    assert torch.equal(first.inputs["token_ids"], again.inputs["token_ids"])
    assert torch.equal(first.rows, again.rows)
    for other in (task.train_batch(8, 4, 1), task.train_batch(7, 4, 2)):
        assert not torch.equal(first.inputs["token_ids"], other.inputs["token_ids"])


def test_a_hash_of_the_token_before_files_values_under_their_keys():
    task = LengthRecall()
    ids = task.train_batch(0, 4, 0).inputs["token_ids"]
    mask = SMatMask(1024, 2, chunk_size=128)
    call = CallInfo(*ids.shape, ids.device, extras={"token_ids": ids})
    routing = HashedRouting(task.vocab_size, num_heads=2, write_lag=1)
    profile = routing(torch.zeros(*ids.shape, 8), mask, call)[0].profile
    cell = TokenHash(task.vocab_size, 2, mask.geometry).profile(ids)
    example, value = (ids.ge(256) & ids.lt(512)).nonzero().T
    assert len(value) == 4 * 64
    assert torch.equal(profile[example, value], cell[example, value - 1])
    assert (ids[example, value - 1] < 256).all()


def test_controls_say_what_each_boundary_leaves_behind():
    controls = LengthRecall().controls()

    def share(arm, cell):
        return controls[f"value behind the boundary, {arm}, {cell}"]

    # The lower block of the paper's table of placed pairs.
    for arm in ("kept", "rebuilt", "doubling"):
        assert [share(arm, f"D={gap}") for gap in (0, 256, 1024, 3072)] == [0] * 4
        assert share(arm, "D=7678") == 100
    assert share("window_4", "D=0") == 0
    assert all(share("window_4", f"D={gap}") == 100 for gap in (256, 1024, 3072, 7678))
    assert share("window_8", "D=0") == pytest.approx(75, abs=1)
    # Two uniform places, the earlier below n and the later above: 2 (n/T) (1 - n/T).
    for length, kept in ((1024, 50), (2048, 37.5), (8192, 2 * 100 / 16 * 15 / 16)):
        assert share("kept", f"T={length}") == pytest.approx(kept, abs=2)
        assert share("rebuilt", f"T={length}") == pytest.approx(50, abs=2)
    assert share("window_4", "T=8192") > share("window_4", "T=1024")
    assert controls["a random value"] == 100 / 256
    assert controls["a random value of the sequence"] == 100 / 64


def test_loss_and_score():
    task = LengthRecall(**SMALL)
    batch = task.train_batch(0, 2, 0)
    outputs = torch.nn.functional.one_hot(batch.targets, task.num_outputs) * 100.0
    assert task.loss(outputs, batch) < 1e-6
    outputs[1, :2] = 0.0
    assert task.score(outputs, batch).tolist() == [1, 0.75]


def test_lengths_or_gaps_may_be_left_out():
    uniform = LengthRecall(seq_len=256, eval_lengths=(256,), gaps=(), region=8, num_eval=1)
    assert [batch.cell for batch in uniform.eval_batches(0)] == ["T=256"]
    assert uniform.max_length == 256
    placed = LengthRecall(seq_len=256, eval_lengths=(), gaps=(0,), placed_length=512, num_eval=1)
    assert [batch.cell for batch in placed.eval_batches(0)] == ["D=0"]
    assert placed.max_length == 512


def test_a_task_survives_json_and_describes_itself():
    task = LengthRecall(**SMALL)
    assert LengthRecall(**json.loads(json.dumps(asdict(task)))) == task
    assert "D = 0, 16, 200" in task.describe()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_pairs": 300}, "num_pairs = 300, but there are 256 keys"),
        ({"seq_len": 128}, "needs 192 tokens, and 128.*length is 128"),
        ({"region": 100}, "128 in a region.*region = 100"),
        ({"gaps": (0, 7681)}, r"gaps of 0 to 7680, but they are \(0, 7681\)"),
        ({"gaps": (-1,)}, r"gaps of 0 to 7680, but they are \(-1,\)"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_with_its_numbers(fields, message):
    with pytest.raises(ValueError, match=message):
        LengthRecall(**fields)
