"""Batches of tasks with several loads: the batch of a step, and a whole load cut into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from smat.tasks.task import Batch, generator_of


class Place(NamedTuple):
    """Which batch of which load, and how many examples it holds."""

    load: int
    number: int
    size: int


def steps_per_epoch(num_examples: Sequence[int], batch_size: int) -> int:
    """Count the batches of an epoch; the last of each load is kept though it may be small.

    >>> steps_per_epoch([100_000, 20_000, 20_000, 20_000, 20_000], batch_size=256)
    707
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more, but it is {batch_size}")
    return sum(-(-count // batch_size) for count in num_examples)


def place_of(
    step: int, batch_size: int, num_examples: Sequence[int], shuffle_seed: str | int | None = None
) -> Place:
    """Find the batch of a step: load after load, or in an order that a seed shuffles each epoch.

    >>> [place_of(step, 4, [6, 3]) for step in range(4)]
    [Place(load=0, number=0, size=4), Place(load=0, number=1, size=2),
    Place(load=1, number=0, size=3), Place(load=0, number=0, size=4)]
    """
    num_steps = steps_per_epoch(num_examples, batch_size)
    epoch, index = divmod(step, num_steps)
    if shuffle_seed is not None:
        generator = generator_of("batch order", shuffle_seed, epoch)
        index = int(torch.randperm(num_steps, generator=generator)[index])
    for load, count in enumerate(num_examples):
        num_batches = -(-count // batch_size)
        if index < num_batches:
            return Place(load, index, min(batch_size, count - index * batch_size))
        index -= num_batches
    raise AssertionError("an index below the number of batches lies in some load")


def pieces_of(batch: Batch, batch_size: int) -> Iterator[Batch]:
    """Cut a batch into smaller ones, the last of which may be smaller still.

    >>> whole = Batch({"token_ids": torch.zeros(5, 8)}, torch.zeros(5, 1), torch.zeros(5, 1))
    >>> [len(part.rows) for part in pieces_of(whole, 2)]
    [2, 2, 1]
    """
    for start in range(0, len(batch.rows), batch_size):
        part = slice(start, start + batch_size)
        inputs = {name: x[part] for name, x in batch.inputs.items()}
        yield Batch(inputs, batch.rows[part], batch.targets[part], batch.cell)
