"""Epochs over several loads: every batch once an epoch, none that mixes loads."""

from collections import Counter

import pytest

from smat.tasks import MQAR

LOADS = ((16, 2, 10), (24, 3, 4), (32, 4, 7))


def contents(task, epoch, batch_size, seed=0):
    """List the batches of an epoch: load, size and tokens."""
    steps = range(
        epoch * task.steps_per_epoch(batch_size), (epoch + 1) * task.steps_per_epoch(batch_size)
    )
    batches = [task.train_batch(step, batch_size, seed) for step in steps]
    return [
        (batch.cell, len(batch.rows), str(batch.inputs["token_ids"].tolist())) for batch in batches
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_visits_every_batch_once_and_keeps_the_last_of_each_load(shuffle):
    task = MQAR(64, LOADS, ((16, 2),), shuffle_batches=shuffle)
    assert task.steps_per_epoch(4) == 3 + 1 + 2
    for epoch in range(3):
        batches = contents(task, epoch, 4)
        assert len(set(batches)) == 6
        sizes = Counter()
        for cell, size, _ in batches:
            sizes[cell] += size
        assert sizes == {f"T={T},N={N}": count for T, N, count in LOADS}
        assert sorted(batches) == sorted(contents(task, 0, 4))


def test_shuffling_changes_the_order_from_epoch_to_epoch_and_seed_to_seed():
    loads = ((16, 2, 400),)
    plain = MQAR(64, loads, ((16, 2),))
    number = {
        seed: {each: i for i, each in enumerate(contents(plain, 0, 4, seed))} for seed in (1, 2)
    }
    assert contents(plain, 1, 4, 1) == list(number[1])
    shuffled = MQAR(64, loads, ((16, 2),), shuffle_batches=True)

    def order(epoch, seed):
        return [number[seed][each] for each in contents(shuffled, epoch, 4, seed)]

    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(epoch, seed)) for epoch in (0, 1) for seed in (1, 2)}) == 4


def test_a_batch_size_of_nothing_is_refused():
    with pytest.raises(ValueError, match="batch_size must be 1 or more, but it is 0"):
        MQAR().steps_per_epoch(0)
