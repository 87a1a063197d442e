"""Draws without replacement have the law that a draw one by one has."""

import itertools
from collections import Counter

import pytest
import torch

from smat.tasks.mqar import weighted_order
from smat.tasks.task import distinct


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square_limit(num_outcomes: int) -> float:
    """Five standard deviations above the mean of chi-square with one degree less."""
    freedom = num_outcomes - 1
    return freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(("count", "population"), [(2, 9), (2, 5), (3, 4), (1, 6)])
def test_every_ordered_choice_is_equally_likely(count, population):
    num_rows = 200_000
    drawn = distinct(num_rows, count, population, generator())
    choices = list(itertools.permutations(range(population), count))
    counts = Counter(map(tuple, drawn.tolist()))
    assert set(counts) == set(choices)
    expected = num_rows / len(choices)
    statistic = sum((counts[choice] - expected) ** 2 / expected for choice in choices)
    assert statistic < chi_square_limit(len(choices))


@pytest.mark.parametrize(("count", "population"), [(64, 4095), (64, 300), (8, 8), (0, 3)])
def test_no_number_repeats_in_a_row(count, population):
    drawn = distinct(500, count, population, generator(1))
    assert drawn.shape == (500, count)
    assert all(len(set(row)) == count for row in drawn.tolist())
    assert count == 0 or 0 <= drawn.min() <= drawn.max() < population


def test_too_many_are_refused():
    with pytest.raises(ValueError, match="5 different numbers out of 4"):
        distinct(1, 5, 4, generator())


def test_weighted_order_has_the_probability_of_drawing_one_after_another():
    weights = torch.tensor([1.0, 2.0, 4.0, 0.5])
    num_rows = 200_000
    counts = Counter(map(tuple, weighted_order(num_rows, weights, generator()).tolist()))
    statistic = 0.0
    orders = list(itertools.permutations(range(4)))
    for order in orders:
        left, probability = weights.sum().item(), 1.0
        for index in order:
            probability *= weights[index].item() / left
            left -= weights[index].item()
        expected = num_rows * probability
        statistic += (counts[order] - expected) ** 2 / expected
    assert statistic < chi_square_limit(len(orders))
