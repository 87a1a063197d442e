"""The learning rate follows the recipe at its first, peak and last steps."""

import math
from itertools import pairwise

import pytest

from smat.training import TrainingConfig
from smat.training.recipe import learning_rate


def rates(**changes):
    config = TrainingConfig(steps=100, batch_size=1, learning_rate=0.4, **changes)
    return [learning_rate(step, config) for step in range(config.steps)]


def test_constant_is_constant():
    assert set(rates()) == {0.4}


def test_warmup_rises_in_equal_steps_to_the_peak():
    found = rates(warmup_steps=4)
    assert found[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    assert set(found[3:]) == {0.4}


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_cosine_falls_from_the_peak_to_the_fraction(warmup, fraction):
    found = rates(schedule="cosine", warmup_steps=warmup, final_fraction=fraction)
    assert max(found) == found[warmup] == 0.4
    assert found[-1] == pytest.approx(0.4 * fraction, abs=1e-15)
    falling = found[warmup:]
    assert all(a > b for a, b in pairwise(falling))
    middle = falling[(len(falling) - 1) // 2]
    expected = (1 + math.cos(math.pi * ((len(falling) - 1) // 2) / (len(falling) - 1))) / 2
    assert middle == pytest.approx(0.4 * (fraction + (1 - fraction) * expected))


def test_a_run_that_is_all_warmup_has_a_cosine_of_no_length():
    assert rates(schedule="cosine", warmup_steps=100)[-1] == 0.4
    assert rates(schedule="cosine", warmup_steps=99, final_fraction=0.5)[-1] == 0.2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "linear"}, r"schedule\n.* be 'constant' or 'cosine' .*input_value='linear'"),
        ({"precision": "8"}, r"precision\n.* be '32-true'.*input_value='8'"),
        ({"steps": 0}, r"steps\n.* be greater than 0 .*input_value=0"),
        ({"weight_decay": -0.1}, r"weight_decay\n.* greater than or equal to 0 .*input_value=-0.1"),
        ({"clip": 0.0}, r"clip\n.* be greater than 0 .*input_value=0.0"),
        ({"lr": 0.1}, r"lr\n.* not permitted .*input_value=0.1"),
        ({"warmup_steps": 11}, "11 warmup steps do not fit in 10 steps"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_recipe_that_cannot_be_is_refused(changes, words):
    settings = {"steps": 10, "batch_size": 1, "learning_rate": 0.1} | changes
    with pytest.raises(ValueError, match=words):
        TrainingConfig(**settings)
