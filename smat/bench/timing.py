"""Time named callables side by side: in turns, in one process, so that their ratios mean something.

The speed of a machine drifts with whatever else runs on it. Taking turns lets every candidate meet
the same weather; medians and quantiles say how rough it was, page faults say what memory cost.
"""

from __future__ import annotations

import gc
import math
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Protocol

import torch

GEMM_SIZE = 2048
MIN_RUNS = 3
LONG_RUN = 5.0  # seconds from which a first run is no worse than any other, and is kept


class Progress(Protocol):
    """Who shows how far a benchmark is."""

    def expect(self, amount: float) -> None:
        """Announce work, in units of the caller's choice."""

    def done(self, amount: float, what: str) -> None:
        """Report work that was announced."""


class NoProgress:
    """Shows nothing."""

    def expect(self, amount: float) -> None:
        """Ignore."""

    def done(self, amount: float, what: str) -> None:
        """Ignore."""


@dataclass(frozen=True)
class Candidate:
    """Something to run, and what a run is expected to cost beside the others."""

    run: Callable[[], object]
    weight: float = 1.0


@dataclass(frozen=True)
class Timing:
    """The runs of one candidate: seconds, and page faults a run."""

    median: float
    low: float
    high: float
    slowest: float
    num_runs: int
    minor_faults: float
    major_faults: float

    def ratio_to(self, baseline: Timing) -> float:
        """How many times the baseline's median this median is."""
        return self.median / baseline.median


@dataclass
class Samples:
    """What was read off the clock and the page-fault counters, run by run."""

    seconds: list[float] = field(default_factory=list)
    minor_faults: list[int] = field(default_factory=list)
    major_faults: list[int] = field(default_factory=list)

    def add(self, run: Callable[[], object], synchronize: Callable[[], None]) -> None:
        """Run once and read everything off."""
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = perf_counter()
        result = run()
        synchronize()
        self.seconds.append(perf_counter() - start)
        after = resource.getrusage(resource.RUSAGE_SELF)
        del result  # giving memory back is not what is timed
        self.minor_faults.append(after.ru_minflt - before.ru_minflt)
        self.major_faults.append(after.ru_majflt - before.ru_majflt)

    def timing(self) -> Timing:
        """Sum the runs up."""
        low, high = quantile(self.seconds, 0.2), quantile(self.seconds, 0.8)
        return Timing(
            median(self.seconds), low, high, max(self.seconds), len(self.seconds),
            float(median(self.minor_faults)), float(median(self.major_faults)),
        )  # fmt: skip


def measure(
    candidates: Mapping[str, Candidate],
    repeats: int,
    budget: float = math.inf,
    progress: Progress | None = None,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, Timing]:
    """Time candidates in turns; the order rotates, so that none always follows the same one.

    >>> timings = measure({"add": Candidate(lambda: 1 + 1), "pass": Candidate(lambda: None)}, 5)
    >>> timings["add"].num_runs, timings["add"].low <= timings["add"].median
    (5, True)

    A first run of each is thrown away. A candidate that used up its budget of seconds leaves after
    `MIN_RUNS` runs.
    """
    progress = NoProgress() if progress is None else progress
    samples = {name: Samples() for name in candidates}
    names = list(candidates)
    for name in names:
        samples[name].add(candidates[name].run, synchronize)
        if samples[name].seconds[0] < LONG_RUN:
            samples[name] = Samples()
        progress.done(candidates[name].weight, name)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(repeats):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                taken = samples[name].seconds
                if len(taken) < repeats and (len(taken) < MIN_RUNS or sum(taken) < budget):
                    samples[name].add(candidates[name].run, synchronize)
                progress.done(candidates[name].weight, name)
            gc.collect()
    finally:
        if was_enabled:
            gc.enable()
    return {name: taken.timing() for name, taken in samples.items()}


def measure_steps(
    steppers: Mapping[str, tuple[Callable[[], object], int]],
    per_turn: int = 16,
    budget: float = math.inf,
    progress: Progress | None = None,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, Samples]:
    """Time steps that change a state, each by itself: a few of one stepper, a few of the next.

    `steppers` maps a name to a step and to how often it is to be taken. A stepper that used up its
    budget of seconds stops after one turn.
    """
    progress = NoProgress() if progress is None else progress
    samples = {name: Samples() for name in steppers}
    most = max((count for _, count in steppers.values()), default=0)
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for taken in range(0, most, per_turn):
            for name, (step, count) in steppers.items():
                turn = min(per_turn, count - taken)
                if turn > 0 and sum(samples[name].seconds) < budget:
                    for _ in range(turn):
                        samples[name].add(step, synchronize)
                progress.done(max(0, turn), name)
    finally:
        if was_enabled:
            gc.enable()
    return samples


def quantile(values: Sequence[float], fraction: float) -> float:
    """Interpolate a quantile between the sorted values.

    >>> quantile([4.0, 1.0, 3.0, 2.0, 5.0], 0.2)
    1.8
    """
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def growth_exponent(sizes: Sequence[float], seconds: Sequence[float]) -> float | None:
    """Fit seconds = a size^b by least squares in logarithms, and return b.

    >>> growth_exponent([1, 2, 4], [3.0, 6.0, 12.0])
    1.0
    """
    if len(set(sizes)) < 2:
        return None
    x, y = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return slope / sum((a - mean_x) ** 2 for a in x)


def gemm(device: torch.device, size: int = GEMM_SIZE) -> Callable[[], object]:
    """A square fp32 matrix product, 2 size^3 operations, to hold everything else against."""
    left, right = torch.rand(2, size, size, device=device)
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def synchronizer(device: torch.device) -> Callable[[], None]:
    """What to call before a clock is read."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
