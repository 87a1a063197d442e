"""Candidates take turns, samples are summed up right, and growth is fitted."""

import gc
import math
import mmap
import time

import pytest
import torch

pytest.importorskip("pydantic")
pytest.importorskip("rich")

from smat.bench import measure
from smat.bench.attention import fit_growth
from smat.bench.measure import Reading, read_in_turns, read_once, sum_up, time_in_turns


def test_candidates_take_turns_in_rotating_order():
    order = []
    candidates = {name: lambda name=name: order.append(name) for name in "abc"}
    timings = time_in_turns(candidates, repeats=3)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab"
    for found in timings.values():
        assert found.num_runs == 3
        assert 0 <= found.low <= found.median <= found.high <= found.slowest


def test_a_candidate_out_of_budget_leaves_after_the_fewest_runs():
    calls = {"slow": 0, "fast": 0}

    def run(name):
        calls[name] += 1
        if name == "slow":
            time.sleep(0.002)

    candidates = {name: lambda name=name: run(name) for name in calls}
    timings = time_in_turns(candidates, repeats=9, budget=0.001)
    assert timings["slow"].num_runs == measure.MIN_RUNS
    assert timings["fast"].num_runs == 9


def test_a_long_first_run_counts(monkeypatch):
    monkeypatch.setattr(measure, "LONG_RUN", 0.0)
    calls = []
    timings = time_in_turns({"long": lambda: calls.append(1)}, repeats=4)
    assert timings["long"].num_runs == len(calls) == 4


def test_page_faults_of_fresh_memory_are_seen():
    def touch():  # not through malloc, which may have kept enough
        with mmap.mmap(-1, 4 << 20) as fresh:
            fresh[:: mmap.PAGESIZE] = bytes(len(fresh) // mmap.PAGESIZE)

    assert read_once(touch).minor_faults > 0


def test_garbage_is_collected_again_afterwards():
    assert gc.isenabled()
    numbers = iter([1, 0])
    with pytest.raises(ZeroDivisionError):
        read_in_turns({"a": (lambda: 1 / next(numbers), 1)}, per_turn=1)
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_steps_come_in_turns_of_a_few():
    order = []
    steppers = {
        "a": (lambda: order.append("a"), 5),
        "b": (lambda: order.append("b"), 2),
    }
    readings = read_in_turns(steppers, per_turn=2)
    assert "".join(order) == "ab" + "aabb" + "aa" + "a"
    assert {name: len(taken) for name, taken in readings.items()} == {"a": 5, "b": 2}


def test_quantiles_interpolate():
    values = torch.rand(11, dtype=torch.float64).tolist()
    expected = torch.quantile(torch.tensor(values, dtype=torch.float64), 0.8).item()
    assert math.isclose(sum_up([Reading(value, 0, 0) for value in values]).high, expected)
    assert sum_up([Reading(3.0, 2, 0)])[:4] == (3.0, 3.0, 3.0, 3.0)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_growth_is_the_slope_in_logarithms(exponent):
    def row(size):
        return {"name": "d=3", "seq_len": size, "timing": {"median": 7 * size**exponent}}

    (found,) = fit_growth([row(size) for size in (100, 300, 500, 1000)]).values()
    assert math.isclose(found, exponent)
    assert fit_growth([row(100)]) == {}
