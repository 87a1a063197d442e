"""Joint context-key recall: a value is found by a context and a key together (Section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional

from smat.tasks.task import Batch, RecallInEpochs, distinct, generator_of, restore_tuples

PAD, BOS, SEP, FIRST_CONTEXT = 0, 1, 2, 3


@dataclass(frozen=True)
class JointRecall(RecallInEpochs):
    """Records (context, key, value) in the first half, every (context, key) asked in the second.

    >>> task = JointRecall(loads=((1, 4),))
    >>> batch = task.train_batch(step=0, batch_size=1, seed=0)
    >>> batch.inputs["token_ids"][0, :13]
    tensor([  1,  18, 162, 553,  18, 366, 549,  18, 238, 559,  18, 225, 550])
    >>> batch.inputs["token_ids"][0, 32:45]
    tensor([  2,  18, 238,   0,  18, 225,   0,  18, 162,   0,  18, 366,   0])
    >>> batch.rows, batch.targets
    (tensor([[34, 37, 40, 43]]), tensor([[559, 550, 553, 549]]))

    A load (C, K) has C contexts with the same K keys, none repeated, and values uniform over 16.
    `describe` says the rest.
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
    # Those of tab:joint_recall and of tab:mom_macro.
    scored_splits: ClassVar[tuple[str, ...]] = ("validation", "test")

    def __post_init__(self) -> None:
        restore_tuples(self, "loads")
        for contexts, keys in self.loads:
            if not (1 <= contexts <= self.num_contexts and 1 <= keys <= self.key_alphabet):
                allowed = f"1 to {self.num_contexts} contexts and 1 to {self.key_alphabet} keys"
                raise ValueError(f"a load takes {allowed}, but it is {(contexts, keys)}")

    @property
    def vocab_size(self) -> int:
        return FIRST_CONTEXT + self.num_contexts + self.key_alphabet + self.num_values

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({sequence_length(*load) for load in self.loads}))

    def loads_of(self, split: str) -> list[tuple[tuple[int, int], int]]:
        counts = {"train": self.num_train, "validation": self.num_validation, "test": self.num_test}
        return [(load, counts[split]) for load in self.loads]

    def draw(self, load: tuple[int, int], num_examples: int, generator: torch.Generator) -> Batch:
        contexts, keys = load
        count, first_key = contexts * keys, FIRST_CONTEXT + self.num_contexts
        context = distinct(num_examples, contexts, self.num_contexts, generator) + FIRST_CONTEXT
        key = distinct(num_examples, keys, self.key_alphabet, generator) + first_key
        value = torch.randint(self.num_values, (num_examples, count), generator=generator)
        value += first_key + self.key_alphabet
        context, key = context.repeat_interleave(keys, 1), key.repeat(1, contexts)
        ids = torch.full((num_examples, sequence_length(contexts, keys)), PAD)
        half = ids.shape[1] // 2
        order = distinct(num_examples, count, count, generator)
        asked = distinct(num_examples, count, count, generator)
        ids[:, 0], ids[:, half] = BOS, SEP
        for place, column in enumerate((context, key, value), start=1):
            ids[:, place : place + 3 * count : 3] = column.gather(1, order)
        for place, column in enumerate((context, key), start=half + 1):
            ids[:, place : place + 3 * count : 3] = column.gather(1, asked)
        rows = (half + 2 + 3 * torch.arange(count)).expand(num_examples, -1).contiguous()
        return Batch({"token_ids": ids}, rows, value.gather(1, asked), _cell(load))

    def controls(self) -> dict[str, float]:
        best = {load: best_single_field(*load, self.num_values) for load in self.loads}
        controls = {
            "a random value": 100 / self.num_values,
            "best single-field majority": 100 * sum(best.values()) / len(best),
        }
        for load, accuracy in best.items():
            controls[f"best single-field majority, {_cell(load)}"] = 100 * accuracy
        return controls

    def describe(self) -> str:
        loads = ", ".join(f"{load} at length {sequence_length(*load)}" for load in self.loads)
        return (
            "Joint context-key recall: shuffled records (context, key, value) in the first half, "
            "every (context, key) asked once in the second, the value predicted on the key. Loads "
            f"(C, K): {loads}; {self.num_train} / {self.num_validation} / {self.num_test} examples "
            "to train, validate and test on each. The paper states counts and lengths; chosen are "
            f"{self.num_contexts} contexts, {self.key_alphabet} keys and {self.num_values} values "
            f"among {self.vocab_size} tokens, a separator in the very middle, padding behind the "
            f"records and behind the queries, and batches {self.describe_order()}. Accuracy is the "
            "mean over the queries of an example, then over examples, then over loads. The best "
            "single-field majority answers with the commonest value of the query's context, or of "
            "its key, whichever is better for the example."
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


def _cell(load: tuple[int, int]) -> str:
    return f"C={load[0]},K={load[1]}"
