"""What every task gives: examples from a seed, rows that count, a loss and the paper's metric."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Batch:
    """Examples of one load.

    >>> batch = Batch({"token_ids": torch.zeros(5, 8)}, torch.zeros(5, 1), torch.zeros(5, 1))
    >>> [len(each.rows) for each in batch.split(2)]
    [2, 2, 1]

    Attributes:
        inputs: Keyword arguments of the model, such as token_ids (B, T) or payload (B, T, k).
        rows: (B, R) positions whose outputs the loss and the metric need; others are not computed.
        targets: (B, R, ...) what is right there.
        cell: The load that the examples belong to, where a task has several.
    """

    inputs: dict[str, Tensor]
    rows: Tensor
    targets: Tensor
    cell: str = ""

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        return self._map(lambda x: x.to(device))

    def select(self, examples: slice) -> Batch:
        """Return some of the examples."""
        return self._map(lambda x: x[examples])

    def split(self, size: int) -> Iterator[Batch]:
        """Cut the batch into smaller ones, the last of which may be smaller still."""
        return (self.select(slice(at, at + size)) for at in range(0, len(self.rows), size))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        inputs = {name: change(x) for name, x in self.inputs.items()}
        return Batch(inputs, change(self.rows), change(self.targets), self.cell)


class Task(Protocol):
    """A task is a frozen dataclass of plain fields, which are its whole configuration.

    Batches are functions of their arguments: the same step and seed give the same examples bit for
    bit, so an interrupted run needs no data state to go on.

    What has a body here is what a task does that says nothing else: recall, with fresh sequences of
    tokens and one right token a query.
    """

    name: ClassVar[str]

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 .. vocab_size - 1; 0 if the task has no tokens."""

    @property
    def payload_dim(self) -> int:
        """The width of the payload at a position; 0 if there is none."""
        return 0

    @property
    def num_outputs(self) -> int:
        """The width of the model's output at a row."""
        return self.vocab_size

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of all sequences, the shortest first."""

    @property
    def max_length(self) -> int:
        """The longest sequence."""
        return self.lengths[-1]

    @property
    def train_length(self) -> int:
        """The longest sequence of training."""
        return self.max_length

    @property
    def keys_per_query(self) -> int:
        """How many keys a query names."""
        return 1

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        """Make the batch of a training step."""

    def steps_per_epoch(self, batch_size: int) -> int | None:
        """Count the steps of an epoch, or None if examples are always fresh."""
        return None

    def eval_batches(self, seed: int, split: str = "test") -> Iterator[Batch]:
        """Make held-out batches; split is "validation" or "test"."""

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the training loss of outputs (B, R, num_outputs): cross-entropy over queries."""
        return functional.cross_entropy(outputs.flatten(0, 1).float(), batch.targets.flatten())

    def score(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the paper's metric, an example (B,) or a query (B, R): the fraction right."""
        return (outputs.argmax(-1) == batch.targets).float().mean(-1)

    def controls(self) -> dict[str, float]:
        """Return what needs no training to know: ceilings, constant predictors, majorities."""

    def describe(self) -> str:
        """Describe the task, and what was chosen where the paper is silent, for the report."""


def seed_of(*names: str | int) -> int:
    """Derive a seed from names and numbers, the same on every machine.

    >>> seed_of("mqar", 0, "train", 17)
    8089474354463750585
    """
    digest = hashlib.sha256("|".join(map(str, names)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator_of(*names: str | int) -> torch.Generator:
    """Return a random generator seeded by names and numbers."""
    return torch.Generator().manual_seed(seed_of(*names))
