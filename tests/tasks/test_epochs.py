"""Epochs over several loads: every batch once an epoch, none that mixes loads."""

from collections import Counter

import pytest

from smat.tasks.epochs import place_of, steps_per_epoch

COUNTS = [10, 4, 7]


@pytest.mark.parametrize("shuffle_seed", [None, 3])
def test_an_epoch_visits_every_batch_once_and_keeps_the_last_of_each_load(shuffle_seed):
    num_steps = steps_per_epoch(COUNTS, 4)
    assert num_steps == 3 + 1 + 2
    for epoch in range(3):
        steps = range(epoch * num_steps, (epoch + 1) * num_steps)
        places = [place_of(step, 4, COUNTS, shuffle_seed) for step in steps]
        assert len(set(places)) == num_steps
        sizes = Counter()
        for place in places:
            sizes[place.load] += place.size
        assert [sizes[load] for load in range(3)] == COUNTS


def test_shuffling_changes_the_order_from_epoch_to_epoch_and_seed_to_seed():
    counts, size = [400], 4

    def order(epoch, seed):
        return [
            place_of(step, size, counts, seed).number
            for step in range(100 * epoch, 100 * epoch + 100)
        ]

    assert order(0, None) == order(1, None) == list(range(100))
    assert order(0, 1) == order(0, 1)
    assert len({tuple(order(epoch, seed)) for epoch in (0, 1) for seed in (1, 2)}) == 4


def test_a_batch_size_of_nothing_is_refused():
    with pytest.raises(ValueError, match="batch_size must be 1 or more, but it is 0"):
        steps_per_epoch([5], 0)
