"""Draw configurations choice by choice, and shrink those that fail."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Case = Callable[["Choices"], None]


class Choices:
    """Answers named questions: as given, else drawn with a seed, else the simplest answer.

    >>> choices = Choices(given={"seq_len": 7})
    >>> choices.pick("seq_len", [1, 2, 7, 64]), choices.pick("dtype", ["float64", "float32"])
    (7, 'float64')
    >>> choices.made
    {'seq_len': 7, 'dtype': 'float64'}

    Options are literals, the simplest first. A drawn answer depends on the seed and the name
    alone, so that another answer to one question leaves the others as they are.
    """

    def __init__(self, seed: int | None = None, given: dict[str, Any] | None = None) -> None:
        self.seed, self.given = seed, given or {}
        self.made: dict[str, Any] = {}
        self.options: dict[str, Sequence[Any]] = {}

    def pick(self, name: str, options: Sequence[Any]) -> Any:
        """Answer one question; a given answer that is no option here becomes the simplest one."""
        value = options[0]
        if name in self.given:
            value = self.given[name] if self.given[name] in options else value
        elif self.seed is not None:
            value = random.Random(f"{self.seed} {name}").choice(options)
        self.made[name], self.options[name] = value, options
        return value


def simpler(options: Sequence[Any], value: Any) -> list[Any]:
    """List answers that stand before a value: the first, the one halfway, the one before.

    >>> simpler(range(100), 40), simpler(["plain", "plain", "padded"], "plain")
    ([0, 20, 39], [])
    """
    place = options.index(value)
    return list(dict.fromkeys(options[at] for at in (0, place // 2, place - 1) if 0 <= at < place))


def shrink(
    fails: Callable[[dict[str, Any]], Choices | None], failed: Choices, tries: int = 400
) -> dict[str, Any]:
    """Return the simplest choices found that still fail, without those that are the simplest.

    ``fails`` runs given choices, and returns what it drew if they fail. One answer at a time is
    made simpler, until none can be.
    """

    def smaller(now: Choices) -> Iterator[dict[str, Any]]:
        for name, value in now.made.items():
            for candidate in simpler(now.options[name], value):
                yield now.made | {name: candidate}

    improved = True
    while improved and tries > 0:
        improved = False
        for given in smaller(failed):
            tries -= 1
            found = fails(given)
            if found is not None:
                failed, improved = found, True
                break
            if tries <= 0:
                break
    return {name: x for name, x in failed.made.items() if x != failed.options[name][0]}
