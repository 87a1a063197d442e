"""What recall tasks share: draws without replacement, held-out splits, and epochs of loads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from smat.tasks.task import Batch, Task, generator_of

SPLITS = ("validation", "test")


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
        """List batches as load, number and size; the last of a load is kept though it is small."""
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
    """Draw `count` different numbers of 0 .. population - 1 for every row, in random order.

    >>> rows = distinct(3, 5, 1000, torch.Generator().manual_seed(0))
    >>> rows.shape, [len(set(row.tolist())) for row in rows]
    (torch.Size([3, 5]), [5, 5, 5])

    Every ordered choice is equally likely.
    """
    if not 0 <= count <= population:
        raise ValueError(f"cannot draw {count} different numbers out of {population}")
    if population <= 4 * count:
        return torch.rand(num_rows, population, generator=generator).argsort(-1)[:, :count]
    # Draw again whatever repeats an earlier number of its row. Which places those are depends on
    # equalities alone, so renaming the numbers renames the outcome, and all outcomes are alike.
    drawn = torch.randint(population, (num_rows, count), generator=generator)
    while (again := _repeats(drawn)).any():
        drawn[again] = torch.randint(population, (int(again.sum()),), generator=generator)
    return drawn


def _repeats(rows: Tensor) -> Tensor:
    """Mark the numbers that occur earlier in their row."""
    ordered, place = rows.sort(dim=-1, stable=True)
    marked = torch.zeros_like(rows, dtype=torch.bool)
    return marked.scatter_(-1, place[:, 1:], ordered[:, 1:] == ordered[:, :-1])
