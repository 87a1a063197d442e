"""Run drawn cases one seed after the other, and report each failure as small as it gets."""

import signal
import time
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import smat
from tests.fuzz.attention import attention
from tests.fuzz.choices import Case, Choices, shrink
from tests.fuzz.damage import damaged
from tests.fuzz.malformed import malformed
from tests.fuzz.states import layers, states

KINDS: dict[str, Case] = {
    case.__name__: case for case in (attention, states, layers, malformed, damaged)
}
TURNS = (
    "attention", "states", "attention", "malformed", "layers", "states", "attention", "damaged",
    "malformed", "states",
)  # fmt: skip
MALFORMED = ("malformed", "damaged")
LONGEST = 60  # seconds that a case may take: what takes longer hangs


def check(kind: str, **given) -> None:
    """Run one case with the given choices, the simplest ones elsewhere.

    >>> check("attention", seq_len=7, vc_dim=2, gates="mild")
    """
    run_case(KINDS[kind], Choices(given=given))


def run_case(case: Case, choices: Choices) -> None:
    with warnings.catch_warnings(), limited(LONGEST):
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", smat.SMatWarning)
        case(choices)


@contextmanager
def limited(seconds):
    """Raise TimeoutError in what takes longer, of the processor's time."""

    def stop(*_):
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@dataclass
class Failure:
    """A case that fails: its seed, its smallest choices, and what it says with them."""

    kind: str
    seed: int
    error: str
    given: dict = field(default_factory=dict)

    def __str__(self) -> str:
        words = "".join(f", {name!r}: {x!r}" for name, x in self.given.items())[2:]
        call = f"check({self.kind!r}, **{{{words}}})"
        said = f"seed {self.seed} fails: {self.error}"
        return f"{said}\n  from tests.fuzz.runner import check; {call}"


def attempt(case: Case, choices: Choices) -> Exception | None:
    try:
        run_case(case, choices)
    except Exception as error:
        return error
    return None


def run_seed(seed: int, kind: str | None = None) -> Failure | None:
    """Run the case of a seed; shrink it if it fails."""
    kind = TURNS[seed % len(TURNS)] if kind is None else kind
    case, choices = KINDS[kind], Choices(seed)
    error = attempt(case, choices)
    if error is None:
        return None
    errors = [error]

    def fails(given):
        tried = Choices(given=given)
        found = attempt(case, tried)
        if type(found) is not type(error):  # another fault, or none
            return None
        errors.append(found)
        return tried

    given = shrink(fails, choices)
    return Failure(kind, seed, f"{type(error).__name__}: {str(errors[-1])[:600]}", given)


@dataclass
class Report:
    """How many cases of each kind ran, and which failed."""

    counts: Counter = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def __str__(self) -> str:
        broken = sum(self.counts[kind] for kind in MALFORMED)
        return (
            f"{self.counts.total() - broken} configurations, {broken} malformed inputs, "
            f"{len(self.failures)} failures"
        )


def run(first=0, seconds=None, count=None, note: Path | None = None, say=print) -> Report:
    """Run cases from a seed on, until time or count is up; note each seed that is finished."""
    report, end = Report(), None if seconds is None else time.monotonic() + seconds
    seed = first
    while (count is None or seed < first + count) and (end is None or time.monotonic() < end):
        failure = run_seed(seed)
        report.counts[TURNS[seed % len(TURNS)]] += 1
        if failure is not None:
            report.failures.append(failure)
            say(str(failure))
        if note is not None:
            note.write_text(f"{seed}\n")
        seed += 1
    return report
