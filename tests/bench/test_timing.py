"""Candidates take turns, samples are summed up right, and growth is fitted."""

import math
import mmap
import time

import pytest
import torch

from smat.bench import timing
from smat.bench.timing import Candidate, Samples, growth_exponent, measure, measure_steps, quantile


class Counted:
    """A progress that adds up what it is told."""

    def __init__(self):
        self.expected, self.finished, self.names = 0.0, 0.0, []

    def expect(self, amount):
        self.expected += amount

    def done(self, amount, what):
        self.finished += amount
        self.names.append(what)


def test_candidates_take_turns_in_rotating_order():
    order = []
    candidates = {name: Candidate(lambda name=name: order.append(name)) for name in "abc"}
    progress = Counted()
    timings = measure(candidates, repeats=3, progress=progress)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    assert progress.finished == 3 * 4
    for found in timings.values():
        assert found.num_runs == 3
        assert 0 <= found.low <= found.median <= found.high <= found.slowest


def test_a_candidate_out_of_budget_leaves_after_the_fewest_runs():
    calls = {"slow": 0, "fast": 0}

    def run(name):
        calls[name] += 1
        if name == "slow":
            time.sleep(0.002)

    candidates = {name: Candidate(lambda name=name: run(name)) for name in calls}
    progress = Counted()
    timings = measure(candidates, repeats=9, budget=0.001, progress=progress)
    assert timings["slow"].num_runs == timing.MIN_RUNS
    assert timings["fast"].num_runs == 9
    assert progress.finished == 2 * 10


def test_a_long_first_run_counts(monkeypatch):
    monkeypatch.setattr(timing, "LONG_RUN", 0.0)
    calls = []
    timings = measure({"long": Candidate(lambda: calls.append(1))}, repeats=4)
    assert timings["long"].num_runs == len(calls) == 4


def test_page_faults_of_fresh_memory_are_seen():
    def touch():  # not through malloc, which may have kept enough
        with mmap.mmap(-1, 4 << 20) as fresh:
            fresh[:: mmap.PAGESIZE] = bytes(len(fresh) // mmap.PAGESIZE)

    samples = Samples()
    samples.add(touch, lambda: None)
    assert samples.minor_faults[0] > 0


def test_steps_come_in_turns_of_a_few():
    order = []
    steppers = {
        "a": (lambda: order.append("a"), 5),
        "b": (lambda: order.append("b"), 2),
    }
    samples = measure_steps(steppers, per_turn=2)
    assert "".join(order) == "aabb" + "aa" + "a"
    assert {name: len(taken.seconds) for name, taken in samples.items()} == {"a": 5, "b": 2}


def test_quantiles_interpolate():
    values = torch.rand(11, dtype=torch.float64).tolist()
    expected = torch.quantile(torch.tensor(values, dtype=torch.float64), 0.8).item()
    assert math.isclose(quantile(values, 0.8), expected)
    assert quantile([3.0], 0.2) == 3.0


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_growth_is_the_slope_in_logarithms(exponent):
    sizes = [100, 300, 500, 1000]
    assert math.isclose(growth_exponent(sizes, [7 * size**exponent for size in sizes]), exponent)
    assert growth_exponent([100], [1.0]) is None
