"""Multi-key subset recall: one query asks for the payloads of k keys (Section 4, appendix)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from smat.geometry import Geometry
from smat.tasks.task import Batch, Task, check_split, distinct, generator_of

FIRST_KEY = 1  # 0 is left for padding


@dataclass(frozen=True)
class MultiKeyRecall(Task):
    """Pairs of a key and a payload lie among noise; an answer row names k keys.

    >>> task = MultiKeyRecall(num_keys=2, seq_len=128)
    >>> batch = task.train_batch(step=0, batch_size=4, seed=0)
    >>> {name: tuple(x.shape) for name, x in batch.inputs.items()}
    {'token_ids': (4, 128), 'payload': (4, 128, 8)}
    >>> batch.rows[0]
    tensor([ 71,  79,  87,  95, 103, 111, 119, 127])
    >>> batch.targets.sum(-1)[0]  # k of the 8 pairs are asked for
    tensor([2., 2., 2., 2., 2., 2., 2., 2.])

    A key stands at an even place of the first half, the marker behind it, and the marker carries
    the payload e_i of the i-th pair: filed under the token before, a payload lies under its key.
    The last k = `num_keys` tokens up to an answer row are the keys that it asks for.
    """

    num_keys: int
    seq_len: int = 1024
    num_pairs: int = 8
    num_answers: int = 8
    key_alphabet: int = 32
    num_noise: int = 256
    num_eval_batches: int = 8
    eval_batch_size: int = 32
    num_heads: int = 4  # of the model whose coverage `controls` predicts

    name: ClassVar[str] = "multi_key_recall"

    def __post_init__(self) -> None:
        if not 1 <= self.num_keys <= self.num_pairs <= self.key_alphabet:
            numbers = f"{self.num_keys}, {self.num_pairs} and {self.key_alphabet}"
            raise ValueError(f"1 <= num_keys <= num_pairs <= key_alphabet, but they are {numbers}")
        length = f"seq_len = {self.seq_len}"
        if self._num_slots < self.num_pairs:
            places = f"{self._num_slots} places for pairs in its first half"
            raise ValueError(f"{length} has {places}, but num_pairs = {self.num_pairs}")
        if self._spacing < self.num_keys:
            tokens = f"{self._spacing} tokens for each of {self.num_answers} answers"
            raise ValueError(f"{length} leaves {tokens}, but num_keys = {self.num_keys}")

    @property
    def num_distant(self) -> int:
        """The first half, n tokens, holds the pairs."""
        return self.seq_len // 2

    @property
    def marker(self) -> int:
        """The token that stands behind every key of a pair."""
        return FIRST_KEY + self.key_alphabet

    @property
    def vocab_size(self) -> int:
        return self.marker + 1 + self.num_noise

    @property
    def payload_dim(self) -> int:
        return self.num_pairs

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.seq_len,)

    @property
    def keys_per_query(self) -> int:
        return self.num_keys

    @property
    def num_outputs(self) -> int:
        return self.num_pairs

    @property
    def _num_slots(self) -> int:
        return len(range(0, self.num_distant - 2, 2))

    @property
    def _spacing(self) -> int:
        return (self.seq_len - self.num_distant) // self.num_answers

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        return self._draw(batch_size, generator_of(self.name, seed, "train", step))

    def eval_batches(self, seed: int, split: str = "test") -> Iterator[Batch]:
        check_split(split)
        for index in range(self.num_eval_batches):
            yield self._draw(self.eval_batch_size, generator_of(self.name, seed, split, index))

    def _draw(self, batch_size: int, generator: torch.Generator) -> Batch:
        shape = (batch_size, self.seq_len)
        ids = torch.randint(self.marker + 1, self.vocab_size, shape, generator=generator)
        place = distinct(batch_size, self.num_pairs, self._num_slots, generator).sort(-1).values * 2
        key = distinct(batch_size, self.num_pairs, self.key_alphabet, generator) + FIRST_KEY
        ids.scatter_(1, place, key).scatter_(1, place + 1, self.marker)
        payload = torch.zeros(*shape, self.num_pairs)
        example = torch.arange(batch_size)[:, None]
        payload[example, place + 1, torch.arange(self.num_pairs)] = 1.0
        num_queries = batch_size * self.num_answers
        asked = distinct(num_queries, self.num_keys, self.num_pairs, generator)
        asked = asked.unflatten(0, (batch_size, self.num_answers))
        rows = self.num_distant - 1 + self._spacing * torch.arange(1, self.num_answers + 1)
        # The first key that is asked for stands in the answer row, the others before it.
        at = rows[:, None] - torch.arange(self.num_keys)
        ids[:, at] = key[example[..., None], asked]
        targets = torch.zeros(batch_size, self.num_answers, self.num_pairs).scatter_(-1, asked, 1.0)
        rows = rows.expand(batch_size, -1).contiguous()
        return Batch({"token_ids": ids, "payload": payload}, rows, targets)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the binary cross-entropy, averaged over pairs and answer rows."""
        return functional.binary_cross_entropy_with_logits(outputs.float(), batch.targets)

    def score(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Mark the queries (B, R) whose raw logits above 0.5 are exactly the pairs asked for."""
        return ((outputs > 0.5) == (batch.targets > 0.5)).all(-1).float()

    def controls(self) -> dict[str, float]:
        odds = self.num_keys / self.num_pairs
        entropy = -sum(p * math.log(p) for p in (odds, 1 - odds) if p > 0)
        controls = {
            "loss of a constant predictor (nats)": entropy,
            "constant predictor": 100.0 * (self.num_keys == self.num_pairs),
            "random guess": 100 / math.comb(self.num_pairs, self.num_keys),
        }
        for vc_dim in (2, 3, 4):
            geometry = Geometry.for_distant(self.num_distant, vc_dim)
            covered = coverage(geometry, self.num_keys, self.num_heads)
            controls[f"some head covers all k, d={vc_dim}"] = 100 * covered
        return controls

    def describe(self) -> str:
        return (
            f"Multi-key subset recall: T = {self.seq_len}, {self.num_pairs} pairs of a key and a "
            f"payload at random even places of the first half, {self.num_answers} answer rows at "
            f"even distances in the second, each asking for k = {self.num_keys} keys; a query is "
            "right if the logits above 0.5 are exactly the pairs asked for. The paper gives no "
            f"layout. Chosen: {self.key_alphabet} keys without repetition, a marker behind each "
            "key that carries the one-hot number of the pair in order of position, noise from "
            f"{self.num_noise} tokens that are neither keys nor marker (token 0 is padding and "
            "never occurs); the keys asked for are drawn anew for every answer row, in random "
            "order, and end on it. The predicted coverage takes one random table a head, "
            f"{self.num_heads} heads."
        )


def coverage(geometry: Geometry, num_keys: int, num_heads: int) -> float:
    """Return the chance that in some head one hyperplane holds the hashed cells of all keys.

    >>> [round(100 * coverage(Geometry(d, q), k, 4), 1) for d, q, k in [(2, 23, 2), (3, 11, 3)]]
    [16.3, 33.9]

    k cells lie on one hyperplane unless their k - 1 differences span F_q^D, which uniform vectors
    do with probability (1 - q^-(k-1)) (1 - q^-(k-2)) ... (1 - q^-(k-D)), D = `ambient_dim`.
    """
    if geometry.ambient_dim == 0:
        return 1.0  # the only hyperplane is the whole space
    spans = 1.0
    for dim in range(geometry.ambient_dim):
        spans *= max(0.0, 1 - float(geometry.field_size) ** (dim + 1 - num_keys))
    return 1 - spans**num_heads
