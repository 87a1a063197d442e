"""Joint context-key recall: a value is found by a context and a key together (Section 4)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from smat.tasks.epochs import pieces_of, place_of, steps_per_epoch
from smat.tasks.recall import check_split, cross_entropy, fraction_right
from smat.tasks.sampling import distinct
from smat.tasks.task import Batch, generator_of

PAD, BOS, SEP, FIRST_CONTEXT = 0, 1, 2, 3


@dataclass(frozen=True)
class JointRecall:
    """Records (context, key, value) in the first half, every (context, key) asked in the second.

    >>> task = JointRecall(loads=((1, 4),))
    >>> batch = task.train_batch(step=0, batch_size=1, seed=0)
    >>> batch.inputs["token_ids"][0, :13]
    tensor([  1,  18, 162, 553,  18, 366, 549,  18, 238, 559,  18, 225, 550])
    >>> batch.inputs["token_ids"][0, 32:45]
    tensor([  2,  18, 238,   0,  18, 225,   0,  18, 162,   0,  18, 366,   0])
    >>> batch.rows, batch.targets
    (tensor([[34, 37, 40, 43]]), tensor([[559, 550, 553, 549]]))

    A load (C, K) has C contexts and K keys, each without repetition; all contexts share the keys,
    and each of the C K values is uniform over 16. Records and queries are shuffled apart. The
    value is to be predicted on the query's key.

    Half of the sequence holds BOS and the records, SEP opens the other half, and padding fills
    both: L = max(64, 6 C K + 2 rounded up to a multiple of 4).
    """

    loads: tuple[tuple[int, int], ...] = ((1, 4), (2, 8), (8, 16), (16, 16), (32, 16))
    num_train: int = 36_000
    num_validation: int = 2_000
    num_test: int = 4_000
    num_contexts: int = 32
    key_alphabet: int = 512
    num_values: int = 16
    eval_batch_size: int = 32
    shuffle_batches: bool = True

    name: ClassVar[str] = "joint_recall"
    payload_dim: ClassVar[int] = 0

    def __post_init__(self) -> None:
        # Lists, which JSON knows alone, become tuples again, so that equal tasks are equal.
        object.__setattr__(self, "loads", tuple(map(tuple, self.loads)))
        for contexts, keys in self.loads:
            if not (1 <= contexts <= self.num_contexts and 1 <= keys <= self.key_alphabet):
                raise ValueError(
                    f"a load takes 1 to {self.num_contexts} contexts and 1 to {self.key_alphabet} "
                    f"keys, but it is {(contexts, keys)}"
                )

    @property
    def _first_key(self) -> int:
        return FIRST_CONTEXT + self.num_contexts

    @property
    def _first_value(self) -> int:
        return self._first_key + self.key_alphabet

    @property
    def vocab_size(self) -> int:
        """Three signs, the contexts, the keys and the values."""
        return self._first_value + self.num_values

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths of all loads."""
        return tuple(sorted({sequence_length(*load) for load in self.loads}))

    @property
    def max_length(self) -> int:
        """The longest load."""
        return max(sequence_length(*load) for load in self.loads)

    @property
    def num_outputs(self) -> int:
        """One logit a token."""
        return self.vocab_size

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        """Make the batch of a step; the same batches come back in every epoch."""
        counts = [self.num_train] * len(self.loads)
        place = place_of(step, batch_size, counts, seed if self.shuffle_batches else None)
        generator = generator_of(self.name, seed, "train", place.load, batch_size, place.number)
        return self._batch(place.size, *self.loads[place.load], generator)

    def steps_per_epoch(self, batch_size: int) -> int:
        """Count the batches of all loads: 705 at the paper's settings."""
        return steps_per_epoch([self.num_train] * len(self.loads), batch_size)

    def eval_batches(self, seed: int, split: str = "test") -> Iterator[Batch]:
        """Make the held-out examples, load after load; `eval_batch_size` does not change them."""
        check_split(split)
        count = self.num_test if split == "test" else self.num_validation
        for load, (contexts, keys) in enumerate(self.loads):
            generator = generator_of(self.name, seed, split, load)
            whole = self._batch(count, contexts, keys, generator)
            yield from pieces_of(whole, self.eval_batch_size)

    def _batch(
        self, batch_size: int, contexts: int, keys: int, generator: torch.Generator
    ) -> Batch:
        context = distinct(batch_size, contexts, self.num_contexts, generator) + FIRST_CONTEXT
        key = distinct(batch_size, keys, self.key_alphabet, generator) + self._first_key
        count = contexts * keys
        drawn = torch.randint(self.num_values, (batch_size, count), generator=generator)
        value = drawn + self._first_value
        context, key = context.repeat_interleave(keys, 1), key.repeat(1, contexts)
        pad = torch.full_like(value, PAD)

        ids = torch.full((batch_size, sequence_length(contexts, keys)), PAD)
        half = ids.shape[1] // 2
        order = distinct(batch_size, count, count, generator)
        asked = distinct(batch_size, count, count, generator)
        ids[:, 0], ids[:, half] = BOS, SEP
        ids[:, 1 : 1 + 3 * count] = _interleave(context, key, value, order)
        ids[:, half + 1 : half + 1 + 3 * count] = _interleave(context, key, pad, asked)
        rows = (half + 2 + 3 * torch.arange(count)).expand(batch_size, -1).contiguous()
        return Batch({"token_ids": ids}, rows, value.gather(1, asked), _cell(contexts, keys))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy over all tokens, averaged over queries."""
        return cross_entropy(outputs, batch)

    def score(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the fraction (B,) of an example's queries that are answered right."""
        return fraction_right(outputs, batch)

    def controls(self) -> dict[str, float]:
        """Return chance, and what a model reaches that looks at one field of the query alone."""
        best = {load: best_single_field(*load, self.num_values) for load in self.loads}
        controls = {
            "a random value": 100 / self.num_values,
            "best single-field majority": 100 * sum(best.values()) / len(best),
        }
        for load, share in best.items():
            controls[f"best single-field majority, {_cell(*load)}"] = 100 * share
        return controls

    def describe(self) -> str:
        """Describe the task and what was chosen where the paper is silent."""
        loads = ", ".join(f"{load} at length {sequence_length(*load)}" for load in self.loads)
        order = "in an order shuffled each epoch" if self.shuffle_batches else "load after load"
        return (
            "Joint context-key recall: shuffled records (context, key, value) in the first half, "
            "every (context, key) asked once in the second, the value predicted on the key. Loads "
            f"(C, K): {loads}; {self.num_train} / {self.num_validation} / {self.num_test} examples "
            "to train, validate and test on each. The paper states counts and lengths; chosen are "
            f"{self.num_contexts} contexts, {self.key_alphabet} keys and {self.num_values} values "
            f"among {self.vocab_size} tokens, a separator in the very middle, padding behind the "
            f"records and behind the queries, and batches {order}. Accuracy is the mean over the "
            "queries of an example, then over examples, then over loads. The best single-field "
            "majority answers with the commonest value of the query's context, or of its key, "
            "whichever is better for the example."
        )


def sequence_length(num_contexts: int, num_keys: int) -> int:
    """Return the length that holds all records in one half and all queries in the other.

    >>> [sequence_length(C, K) for C, K in JointRecall().loads]
    [64, 100, 772, 1540, 3076]
    """
    return max(64, 4 * -(-(6 * num_contexts * num_keys + 2) // 4))


def best_single_field(
    num_contexts: int, num_keys: int, num_values: int, num_examples: int = 4000
) -> float:
    """Estimate the accuracy of the commonest value of a context or of a key, the better of both.

    >>> best_single_field(1, 4, 16)  # with one context the key alone decides
    1.0
    """
    generator = generator_of("best single field", num_contexts, num_keys, num_values)
    shape = (num_examples, num_contexts, num_keys)
    total = 0.0
    for drawn in torch.randint(num_values, shape, generator=generator).split(200):
        value = functional.one_hot(drawn, num_values).float()
        by_context = value.sum(2).amax(-1).mean(-1) / num_keys
        by_key = value.sum(1).amax(-1).mean(-1) / num_contexts
        total += torch.maximum(by_context, by_key).double().sum().item()
    return total / num_examples


def _interleave(first: Tensor, second: Tensor, third: Tensor, order: Tensor) -> Tensor:
    """Write three columns as one row of triples, in a given order."""
    columns = [column.gather(1, order) for column in (first, second, third)]
    return torch.stack(columns, -1).flatten(1)


def _cell(num_contexts: int, num_keys: int) -> str:
    return f"C={num_contexts},K={num_keys}"
