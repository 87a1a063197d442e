"""Recall at lengths past the training length, and across the boundary (appendix on windows)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from smat.masks import doubling, kept, window
from smat.tasks.task import Batch, Task, check_split, distinct, generator_of, restore_tuples

Layout = tuple[Tensor, Tensor]  # where the pairs and the queries of the keys stand, (B, N) each


class Cell(NamedTuple):
    """What is evaluated: a uniform layout, or one with a gap between pairs and queries."""

    length: int
    gap: int | None = None

    @property
    def name(self) -> str:
        return f"T={self.length}" if self.gap is None else f"D={self.gap}"


@dataclass(frozen=True)
class LengthRecall(Task):
    """Pairs and queries among noise; train at one length, evaluate at longer ones.

    >>> task = LengthRecall(seq_len=32, num_pairs=4, eval_lengths=(32, 64), placed_length=64,
    ...                     gaps=(0, 32), region=16)
    >>> batch = task.train_batch(step=0, batch_size=1, seed=0)
    >>> ids, row = batch.inputs["token_ids"][0], batch.rows[0, 0]
    >>> earlier = int((ids[:row] == ids[row]).nonzero())  # the key occurs once before its query
    >>> bool(ids[earlier + 1] == batch.targets[0, 0])
    True
    >>> sorted({batch.cell for batch in task.eval_batches(seed=0)})
    ['D=0', 'D=32', 'T=32', 'T=64']

    Under the placed layout all pairs lie in a region of `region` tokens, all queries in the region
    that ends the sequence, and D tokens between the two; `describe` says the rest. Paper: D is one
    of `gaps`.
    """

    seq_len: int = 1024
    num_pairs: int = 64
    eval_lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)
    placed_length: int = 8192
    gaps: tuple[int, ...] = (0, 256, 1024, 3072, 7678)
    region: int = 256
    num_keys: int = 256
    num_values: int = 256
    num_noise: int = 256
    num_eval: int = 128
    eval_batch_size: int = 8

    name: ClassVar[str] = "length_recall"

    def __post_init__(self) -> None:
        restore_tuples(self, "eval_lengths", "gaps")
        pairs, region = self.num_pairs, self.region
        if not 1 <= pairs <= min(self.num_keys, self.num_values):
            available = f"{self.num_keys} keys and {self.num_values} values"
            raise ValueError(f"num_pairs = {pairs}, but there are {available}")
        shortest = min((self.seq_len, *self.eval_lengths))
        if shortest < 3 * pairs or (self.gaps and region < 2 * pairs):
            needed = f"num_pairs = {pairs} needs {3 * pairs} tokens, and {2 * pairs} in a region"
            raise ValueError(f"{needed}, but the shortest length is {shortest}, {region = }")
        longest = self.placed_length - 2 * region
        if any(not 0 <= gap <= longest for gap in self.gaps):
            allowed = f"placed_length = {self.placed_length} leaves gaps of 0 to {longest}"
            raise ValueError(f"{allowed}, but they are {self.gaps}")

    @property
    def vocab_size(self) -> int:
        return self.num_keys + self.num_values + self.num_noise

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({self.seq_len, *(cell.length for cell in self._cells())}))

    @property
    def train_length(self) -> int:
        return self.seq_len

    def _cells(self) -> list[Cell]:
        placed = [Cell(self.placed_length, gap) for gap in self.gaps]
        return [Cell(length) for length in self.eval_lengths] + placed

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        generator = generator_of(self.name, seed, "train", step)
        return self._draw(Cell(self.seq_len), batch_size, generator)

    def eval_batches(self, seed: int, split: str = "test") -> Iterator[Batch]:
        check_split(split)
        for cell in self._cells() if split == "test" else [Cell(self.seq_len)]:
            generator = generator_of(self.name, seed, split, cell.name)
            yield from self._draw(cell, self.num_eval, generator).split(self.eval_batch_size)

    def _draw(self, cell: Cell, num_examples: int, generator: torch.Generator) -> Batch:
        place, query = self._layout(cell, num_examples, generator)
        first_noise, shape = self.num_keys + self.num_values, (num_examples, cell.length)
        ids = torch.randint(first_noise, self.vocab_size, shape, generator=generator)
        key = distinct(num_examples, self.num_pairs, self.num_keys, generator)
        value = distinct(num_examples, self.num_pairs, self.num_values, generator) + self.num_keys
        ids.scatter_(1, place, key).scatter_(1, place + 1, value).scatter_(1, query, key)
        rows, order = query.sort(-1)
        return Batch({"token_ids": ids}, rows, value.gather(1, order), cell.name)

    def _layout(self, cell: Cell, num_examples: int, generator: torch.Generator) -> Layout:
        if cell.gap is None:
            return uniform_layout(num_examples, self.num_pairs, cell.length, generator)
        # Pairs in one region, queries in the last; as below, pairs first shrink to one token each.
        shrunk = distinct(num_examples, self.num_pairs, self.region - self.num_pairs, generator)
        key = shrunk.sort(-1).values + torch.arange(self.num_pairs)
        query = distinct(num_examples, self.num_pairs, self.region, generator)
        last = cell.length - self.region
        return key + last - self.region - cell.gap, query + last

    def controls(self) -> dict[str, float]:
        controls = {
            "a random value": 100 / self.num_values,
            "a random value of the sequence": 100 / self.num_pairs,
        }
        for cell in self._cells():
            schedules = {
                "kept": kept(self.seq_len // 2),
                "rebuilt": kept(cell.length // 2),
                "doubling": doubling(),
                "window_8": window(self.seq_len // 8),
                "window_4": window(self.seq_len // 4),
            }
            generator = generator_of(self.name, "controls", cell.name)
            key, query = self._layout(cell, 200, generator)
            for arm, schedule in schedules.items():
                boundary = torch.tensor([schedule.boundary_at(t) for t in range(cell.length)])
                behind = (key + 1 < boundary[query]).double().mean().item()
                controls[f"value behind the boundary, {arm}, {cell.name}"] = 100 * behind
        return controls

    def describe(self) -> str:
        return (
            f"Recall at longer lengths: {self.num_pairs} pairs of a key and a value among noise, "
            "every key once with its value and once later as a query, on which the value is "
            f"predicted. Trained at length {self.seq_len} with uniform positions, evaluated at "
            f"{', '.join(map(str, self.eval_lengths))}, and at length {self.placed_length} with "
            f"all queries in the last {self.region} tokens and all pairs in {self.region} tokens "
            f"that end D = {', '.join(map(str, self.gaps))} tokens before. The paper leaves the "
            f"rest open. Chosen: {self.num_keys} keys, {self.num_values} values and "
            f"{self.num_noise} noise tokens apart from each other, keys and values without "
            "repetition in a sequence, the value right behind its key, and positions uniform over "
            "all arrangements in which nothing overlaps and the query follows its pair; "
            f"{self.num_eval} held-out sequences for each length and gap."
        )


def uniform_layout(
    num_rows: int, num_pairs: int, length: int, generator: torch.Generator
) -> Layout:
    """Draw pairs (two tokens) and queries (one token) uniformly, each query behind its pair.

    >>> key, query = uniform_layout(1, 3, 9, torch.Generator().manual_seed(0))
    >>> torch.cat([key, key + 1, query]).flatten().sort()[0]  # no token is left over
    tensor([0, 1, 2, 3, 4, 5, 6, 7, 8])
    """
    # With each pair shrunk to one token, items are any 2 N of the places left, and any matching of
    # the items into twos says which belong together; the earlier one of two grows again.
    place = distinct(num_rows, 2 * num_pairs, length - num_pairs, generator).sort(-1).values
    matched = distinct(num_rows, 2 * num_pairs, 2 * num_pairs, generator)
    one, other = matched[:, :num_pairs], matched[:, num_pairs:]
    pair, query = torch.minimum(one, other), torch.maximum(one, other)
    is_pair = torch.zeros_like(place).scatter_(1, pair, 1)
    place = place + is_pair.cumsum(-1) - is_pair
    return place.gather(1, pair), place.gather(1, query)
