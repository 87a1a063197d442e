"""What tasks give, examples from a seed, a loss, the paper's metric; and what they draw with."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

SPLITS = ("validation", "test")
SAMPLING_ERROR = ", sampling error"  # ends the name of a control that is another one's deviation


@dataclass(frozen=True)
class Batch:
    """Examples of one load.

    >>> batch = Batch({"token_ids": torch.zeros(5, 8)}, torch.zeros(5, 1), torch.zeros(5, 1))
    >>> [len(each.rows) for each in batch.split(2)]
    [2, 2, 1]
    """

    inputs: dict[str, Tensor]  # of the model by name, such as token_ids (B, T), payload (B, T, k)
    rows: Tensor  # (B, R) positions whose outputs the loss and the metric need
    targets: Tensor  # (B, R, ...) what is right there
    cell: str = ""  # the load that the examples belong to, where a task has several

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        return self._map(lambda x: x.to(device))

    def select(self, examples: slice) -> Batch:
        """Return some of the examples."""
        return self._map(itemgetter(examples))

    def split(self, size: int) -> Iterator[Batch]:
        """Cut the batch into smaller ones, the last of which may be smaller still."""
        return (self.select(slice(at, at + size)) for at in range(0, len(self.rows), size))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        inputs = {name: change(x) for name, x in self.inputs.items()}
        return Batch(inputs, change(self.rows), change(self.targets), self.cell)


class Task(Protocol):
    """A task is a frozen dataclass of plain fields, which are its whole configuration.

    The same step and seed give the same batch bit for bit, so an interrupted run needs no data
    state to go on. What has a body here is recall, with fresh tokens and one right token a query.
    """

    name: ClassVar[str]

    @property
    def scored_splits(self) -> tuple[str, ...]:
        """What a trained model is scored on; the first is its accuracy, and fills cells by load."""
        return ("test",)

    @property
    def unit(self) -> str:
        """The unit of results; what records call accuracy is a loss where it is not per cent."""
        return "%"

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

    def scores(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the metric by cell, where a batch fills several; else that of its own cell."""
        return {batch.cell: self.score(outputs, batch)}

    def values(self, means: Mapping[str, float]) -> dict[str, float]:
        """Turn the mean score of each cell into a result in the task's unit."""
        return {cell: 100 * mean for cell, mean in means.items()}

    def source(self) -> str:
        """Name what the examples come from beside the seed by a hash; ValueError if it is missing.

        Tasks that draw all they need have nothing to name.
        """
        return ""

    def controls(self) -> dict[str, float]:
        """Return what needs no training to know: ceilings, constant predictors, majorities."""

    def describe(self) -> str:
        """Describe the task, and what was chosen where the paper is silent, for the report."""


class RecallInEpochs(Task):
    """Recall under several loads: every epoch has the same batches, and none mixes loads."""

    eval_batch_size: int
    shuffle_batches: bool

    @abstractmethod
    def loads_of(self, split: str) -> list[tuple[tuple[int, int], int]]:
        """List the loads of a split, each with its number of examples."""

    @abstractmethod
    def draw(self, load: tuple[int, int], num_examples: int, generator: torch.Generator) -> Batch:
        """Make examples of a load."""

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        """Make the batch of a step: load after load, or in an order shuffled each epoch."""
        batches = self._epoch(batch_size)
        epoch, index = divmod(step, len(batches))
        if self.shuffle_batches:
            generator = generator_of("batch order", seed, epoch)
            index = int(torch.randperm(len(batches), generator=generator)[index])
        load, number, size = batches[index]
        generator = generator_of(self.name, seed, "train", load, batch_size, number)
        return self.draw(self.loads_of("train")[load][0], size, generator)

    def steps_per_epoch(self, batch_size: int) -> int:
        return len(self._epoch(batch_size))

    def _epoch(self, batch_size: int) -> list[tuple[int, int, int]]:
        """List batches as load, number and size; the last of a load may be small."""
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, but it is {batch_size}")
        return [
            (load, number, min(batch_size, count - start))
            for load, (_, count) in enumerate(self.loads_of("train"))
            for number, start in enumerate(range(0, count, batch_size))
        ]

    def eval_batches(self, seed: int, split: str = "test") -> Iterator[Batch]:
        """Make the held-out examples, load after load; `eval_batch_size` does not change them."""
        check_split(split)
        for number, (load, count) in enumerate(self.loads_of(split)):
            generator = generator_of(self.name, seed, split, number)
            yield from self.draw(load, count, generator).split(self.eval_batch_size)

    def describe_order(self) -> str:
        """Say in which order training takes the batches."""
        return "in an order shuffled each epoch" if self.shuffle_batches else "load after load"


def check_split(split: str) -> None:
    """Refuse a split that is not held out: its seed might be that of training."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, but it is {split!r}")


def restore_tuples(task: Task, *names: str) -> None:
    """Make tuples of lists, which JSON knows alone, so that equal tasks are equal."""
    for name in names:
        items = (tuple(x) if isinstance(x, list) else x for x in getattr(task, name))
        object.__setattr__(task, name, tuple(items))


def distinct(num_rows: int, count: int, population: int, generator: torch.Generator) -> Tensor:
    """Draw `count` different numbers of 0 .. population - 1 for every row, (num_rows, count).

    >>> [len(set(row.tolist())) for row in distinct(3, 5, 1000, torch.Generator().manual_seed(0))]
    [5, 5, 5]

    Every ordered choice is equally likely.
    """
    if not 0 <= count <= population:
        raise ValueError(f"cannot draw {count} different numbers out of {population}")
    if population <= 4 * count:
        return torch.rand(num_rows, population, generator=generator).argsort(-1)[:, :count]
    # Draw again whatever repeats an earlier number of its row. Which places those are depends on
    # equalities alone, so renaming the numbers renames the outcome, and all outcomes are alike.
    drawn = torch.randint(population, (num_rows, count), generator=generator)
    while True:
        ordered, place = drawn.sort(dim=-1, stable=True)
        again = torch.zeros_like(drawn, dtype=torch.bool)
        again.scatter_(-1, place[:, 1:], ordered[:, 1:] == ordered[:, :-1])
        if not again.any():
            return drawn
        drawn[again] = torch.randint(population, (int(again.sum()),), generator=generator)


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
