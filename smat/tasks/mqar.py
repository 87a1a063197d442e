"""Multi-query associative recall with the distribution of the Zoology generator (Section 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from smat.tasks.task import Batch, RecallInEpochs, distinct, generator_of, restore_tuples

TRAIN_LOADS = ((64, 4, 100_000), (128, 8, 20_000), *((256, N, 20_000) for N in (16, 32, 64)))
EVAL_LOADS = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64))


@dataclass(frozen=True)
class MQAR(RecallInEpochs):
    """N pairs of a key and a value, then every key once more: recall its value there.

    >>> task = MQAR(32, train_loads=((16, 2, 100),), eval_loads=((16, 2),), random_fillers=False)
    >>> batch = task.train_batch(step=0, batch_size=1, seed=0)
    >>> batch.inputs["token_ids"]
    tensor([[ 6, 17,  2, 18,  0,  0,  0,  0,  2,  0,  6,  0,  0,  0,  0,  0]])
    >>> batch.rows, batch.targets
    (tensor([[ 8, 10]]), tensor([[18, 17]]))
    >>> MQAR().steps_per_epoch(batch_size=256)
    707

    Keys come from 1 .. V/2 - 1 and values from V/2 .. V - 1, without repetition. The context of 2N
    tokens is k_1 v_1 ... k_N v_N; behind it key i stands at 2N + 2 g_i, where g_1, ..., g_N are
    drawn without replacement from 0 .. S - 1, S = (T - 2N) / 2, with p(g) ~ a (g + 1)^(a - 1), and
    the other places hold random tokens. The value is to be predicted on the key; it is not there
    behind it. A load is (T, N, examples to train on), or (T, N) to evaluate on.

    Paper: V = `vocab_size`; a = `power` (Zoology's `power_a`).
    """

    vocab_size: int = 8192
    train_loads: tuple[tuple[int, int, int], ...] = TRAIN_LOADS
    eval_loads: tuple[tuple[int, int], ...] = EVAL_LOADS
    num_eval: int = 1000
    eval_batch_size: int = 32
    power: float = 0.01
    random_fillers: bool = True
    shuffle_batches: bool = False

    name: ClassVar[str] = "mqar"

    def __post_init__(self) -> None:
        restore_tuples(self, "train_loads", "eval_loads")
        num_keys = self._first_value - 1
        for length, pairs, *_ in self.train_loads + self.eval_loads:
            load = f"T = {length} and N = {pairs}"
            if not 1 <= pairs <= length // 4:
                raise ValueError(f"a load needs 4 N <= T and N >= 1, but {load}")
            if pairs > num_keys:
                raise ValueError(f"vocab_size = {self.vocab_size} has {num_keys} keys, but {load}")

    @property
    def _first_value(self) -> int:
        return self.vocab_size // 2

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({load[0] for load in self.train_loads + self.eval_loads}))

    def loads_of(self, split: str) -> list[tuple[tuple[int, int], int]]:
        if split == "train":
            return [((seq_len, num_pairs), count) for seq_len, num_pairs, count in self.train_loads]
        return [(load, self.num_eval) for load in self.eval_loads]

    def draw(self, load: tuple[int, int], num_examples: int, generator: torch.Generator) -> Batch:
        seq_len, num_pairs = load
        keys = distinct(num_examples, num_pairs, self._first_value - 1, generator) + 1
        num_values = self.vocab_size - self._first_value
        values = distinct(num_examples, num_pairs, num_values, generator) + self._first_value
        ids = torch.zeros(num_examples, seq_len, dtype=torch.long)
        if self.random_fillers:
            ids = torch.randint(self.vocab_size, (num_examples, seq_len), generator=generator)
        ids[:, 0 : 2 * num_pairs : 2] = keys
        ids[:, 1 : 2 * num_pairs : 2] = values
        rows = 2 * (num_pairs + self._gaps(load, num_examples, generator))
        ids.scatter_(1, rows, keys)
        rows, order = rows.sort(-1)
        return Batch({"token_ids": ids}, rows, values.gather(1, order), _cell(load))

    def _gaps(self, load: tuple[int, int], num_rows: int, generator: torch.Generator) -> Tensor:
        """Draw g_1, ..., g_N: one after another, so early pairs tend to be asked for early."""
        seq_len, num_pairs = load
        num_gaps = (seq_len - 2 * num_pairs) // 2
        weights = torch.arange(1, num_gaps + 1).double() ** (self.power - 1)
        return weighted_order(num_rows, weights, generator)[:, :num_pairs]

    def controls(self) -> dict[str, float]:
        num_values = self.vocab_size - self._first_value
        guesses = [100 / num_pairs for _, num_pairs in self.eval_loads]
        controls = {
            "a random value": 100 / num_values,
            "a random value of the context": sum(guesses) / len(guesses),
        }
        for load in self.eval_loads:
            seq_len, num_pairs = load
            gaps = self._gaps(load, 20_000, generator_of(self.name, "controls"))
            recent = (2 * (num_pairs + gaps) >= seq_len // 2).double().mean().item()
            controls[f"queries in the second half, {_cell(load)}"] = 100 * recent
        return controls

    def describe(self) -> str:
        train = ", ".join(f"({T}, {N}) x {count}" for T, N, count in self.train_loads)
        test = ", ".join(str(load) for load in self.eval_loads)
        return (
            f"Multi-query associative recall over {self.vocab_size} tokens, with the distribution "
            f"of the Zoology generator (gap exponent {self.power}). Loads (T, N) to train on: "
            f"{train}, batches {self.describe_order()}; held out, {self.num_eval} examples each: "
            f"{test}. Accuracy is the mean over the queries of an example, then over examples, "
            "then over loads. The paper does not list the held-out loads: chosen are Zoology's up "
            "to length 256. Its pipeline takes the loads in order, while the authors' published "
            "settings shuffle the batches: both are offered. The last epoch counts, not the best "
            "one. From N = T/4 on, the pairs fill the first half, so every query lies behind the "
            "boundary."
        )


def weighted_order(num_rows: int, weights: Tensor, generator: torch.Generator) -> Tensor:
    """Draw all indices one after another without replacement, each with odds like its weight.

    >>> order = weighted_order(4000, torch.tensor([1.0, 3.0]), torch.Generator().manual_seed(0))
    >>> round((order[:, 0] == 1).double().mean().item(), 1)
    0.8

    A race: index g finishes after an exponential time -log(1 - u) / w(g), first with probability
    w(g) / sum w; waiting times have no memory, so arrivals are draws.
    """
    # Not `exponential_`, which draws other numbers where torch is built with another library.
    uniform = torch.rand(num_rows, len(weights), generator=generator, dtype=torch.float64)
    return (torch.log1p(-uniform) / weights).argsort(-1, descending=True)


def _cell(load: tuple[int, int]) -> str:
    return f"T={load[0]},N={load[1]}"
