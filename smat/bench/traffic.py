"""Bytes that kernels move: a formula for each, and the least that the algorithm needs.

Loads count once a program, however often it repeats them (a program's own repetitions stay in its
first cache or its registers), and once for every program that makes them. The tests hold each
formula against the loads and stores that Triton's interpreter makes. Positional assignment only:
what content routing moves depends on the content.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smat.bench.launches import Case, backward_launches, forward_launches
from smat.ops.triton.launch import Launch

WORD, INDEX = 4, 8  # bytes of fp32 and of an int64


class Traffic(NamedTuple):
    """Bytes that are loaded and stored."""

    loads: int
    stores: int

    def __add__(self, other: object) -> Traffic:
        assert isinstance(other, Traffic)
        return Traffic(self.loads + other.loads, self.stores + other.stores)

    @property
    def total(self) -> int:
        """Both."""
        return self.loads + self.stores


class Chunk(NamedTuple):
    """A chunk of the causal branch, and a window's visits to chunks."""

    tokens: int
    windows: int  # that visit it


class Window(NamedTuple):
    """A window of the causal branch: its chunks and tokens, and those of its own segment."""

    chunks: int
    tokens: int
    own_chunks: int
    own_tokens: int


class Cuts(NamedTuple):
    """How the causal branch cuts a sequence, with values (a launch knows sizes alone)."""

    chunks: list[Chunk]
    windows: list[Window]

    @classmethod
    def of(cls, chunks: Tensor, windows: Tensor) -> Cuts:
        """Read the tables of a plan."""
        edges = chunks.tolist()
        found = []
        for first, own, end, _ in windows.tolist():
            stop = edges[end - 1][1]
            found.append(Window(end - first, stop - edges[first][0], end - own, stop - edges[own][0]))
        return cls([Chunk(stop - start, last - own + 1) for start, stop, own, last in edges], found)


class View:
    """A launch's arguments by name; sizes of elements, 0 for what is not there."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.given = launch, {**launch.arguments, **launch.meta}

    def __getattr__(self, name: str) -> Any:
        return self.given[name]

    def bytes_of(self, *names: str) -> int:
        """Bytes of an element of each tensor that is there, all together."""
        there = (self.given[name] for name in names)
        return sum(x.element_size() for x in there if x is not None)

    def has(self, name: str) -> bool:
        """Whether a tensor was given."""
        return self.given[name] is not None

    def tiles(self, size: str, block: str) -> int:
        """Count the blocks of a width."""
        return -(-self.given[size] // self.given[block])
