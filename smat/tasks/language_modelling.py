"""Language modelling on books (Section 4 and appendix on excerpts): the next token, everywhere."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor

from smat.data.shards import MANIFEST, TokenSplit, data_folder, open_split, read_manifest
from smat.tasks.task import Batch, Task, check_split, generator_of, restore_tuples

Unit = Literal["bits per byte", "nats", "perplexity"]


@dataclass(frozen=True)
class LanguageModelling(Task):
    """Excerpts of packed books, the next token as the target of each.

    >>> task = LanguageModelling(seq_len=512, eval_length=1024, bins=(0, 512, 1024))
    >>> task.lengths, task.cells
    ((512, 1024), ['[0,512)', '[512,1024)'])

    Tokens are read from the folder that SMAT_DATA (or ``smat run --data``) names, and never whole.
    A model that is given `targets` answers with the loss of each in nats, so that no logits of a
    whole excerpt need be held. `bins` are edges of positions in an excerpt, each bin a cell; none:
    the excerpt is one cell. Training takes excerpts in an order shuffled each epoch, the same for
    all models of a seed; what is evaluated is spread evenly over the split, the same for all seeds.
    """

    tokens: str = "bytes"  # the folder below SMAT_DATA
    vocab_size: int = 256
    seq_len: int = 2048
    eval_length: int = 16384
    bins: tuple[int, ...] = ()
    unit: Unit = "bits per byte"
    scored_split: str = "test"
    num_eval: int = 128  # excerpts of eval_length, of what there are
    num_validation: int = 64  # excerpts of seq_len, while training
    eval_batch_size: int = 1

    name: ClassVar[str] = "language_modelling"

    def __post_init__(self) -> None:
        restore_tuples(self, "bins")
        check_split(self.scored_split)
        if self.unit == "bits per byte" and self.tokens != "bytes":
            raise ValueError(f"bits per byte are for bytes, not for tokens {self.tokens!r}")
        edges = self.bins
        rises = all(low < high for low, high in pairwise(edges))
        if edges and not (rises and edges[0] == 0 and edges[-1] <= self.eval_length):
            rule = f"bins must rise from 0 to {self.eval_length} at most"
            raise ValueError(f"{rule}, but they are {edges}")

    @property
    def scored_splits(self) -> tuple[str, ...]:
        return (self.scored_split,)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(sorted({self.seq_len, self.eval_length}))

    @property
    def train_length(self) -> int:
        return self.seq_len

    @property
    def cells(self) -> list[str]:
        """What an evaluation fills."""
        bins = [f"[{low},{high})" for low, high in pairwise(self.bins)]
        return bins or [f"T={self.eval_length}"]

    def source(self) -> str:
        """Return a hash of the manifest, whose hashes are those of the tokens."""
        folder = data_folder(self.tokens)
        read_manifest(folder, self.vocab_size)
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        text = self._open("train")
        count = text.num_excerpts(self.seq_len)
        places = range(step * batch_size, (step + 1) * batch_size)
        numbers = [int(excerpt_order(count, seed, at // count)[at % count]) for at in places]
        return _batch(text.excerpts(numbers, self.seq_len))

    def eval_batches(self, seed: int, split: str = "test") -> Iterator[Batch]:
        check_split(split)
        is_scored = split == self.scored_split
        length = self.eval_length if is_scored else self.seq_len
        wanted = self.num_eval if is_scored else self.num_validation
        text = self._open(split)
        count = text.num_excerpts(length)
        wanted = min(wanted, count)
        numbers = [place * count // wanted for place in range(wanted)]
        size = max(1, self.eval_batch_size * self.eval_length // length)
        for at in range(0, wanted, size):
            yield _batch(text.excerpts(numbers[at : at + size], length))

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return outputs.mean()

    def scores(self, outputs: Tensor, batch: Batch) -> dict[str, Tensor]:
        if outputs.shape[1] != self.eval_length or not self.bins:
            return {f"T={outputs.shape[1]}": outputs}
        edges = zip(self.cells, pairwise(self.bins), strict=True)
        return {cell: outputs[:, low:high] for cell, (low, high) in edges}

    def values(self, means: Mapping[str, float]) -> dict[str, float]:
        return {cell: self._value(mean) for cell, mean in means.items()}

    def _value(self, nats: float) -> float:
        """Write a loss in the unit of the table."""
        if self.unit == "perplexity":
            return math.exp(min(nats, 700.0))  # past this there is no number left
        return nats / math.log(2) if self.unit == "bits per byte" else nats

    def controls(self) -> dict[str, float]:
        manifest = read_manifest(data_folder(self.tokens), self.vocab_size)
        unigram = manifest["splits"][self.scored_split]["unigram_nats"]
        return {
            "every token equally likely": self._value(math.log(self.vocab_size)),
            "frequencies of the training books": self._value(unigram),
        }

    def describe(self) -> str:
        kind = {"bytes": "bytes", "gpt2": "the vocabulary of GPT-2"}
        tokens = kind.get(
            self.tokens, f"a vocabulary of {self.vocab_size:,} made of the same books"
        )
        return (
            f"Language modelling on PG-19 in {tokens}: books one behind the other, a token that "
            f"ends each between them, cut into excerpts of {self.seq_len} tokens for training and "
            f"of {self.eval_length} for the {self.scored_split} split, {self.num_eval} of which "
            f"are spread over all of its books. The result is the mean loss over positions, as "
            f"{self.unit}. Excerpts may begin in the middle of a book and hold the end of one."
        )

    def _open(self, split: str) -> TokenSplit:
        return open_split(data_folder(self.tokens), split, self.vocab_size)


@lru_cache(maxsize=2)  # a batch may reach into the next epoch
def excerpt_order(count: int, seed: int, epoch: int) -> Tensor:
    """Return the numbers of all excerpts in the order of an epoch."""
    generator = generator_of("language_modelling", seed, "order", epoch)
    return torch.randperm(count, generator=generator)


def _batch(excerpts: Tensor) -> Batch:
    """Make a batch of excerpts (B, T + 1); all rows count, and the model is told their targets."""
    token_ids, targets = excerpts[:, :-1].contiguous(), excerpts[:, 1:].contiguous()
    rows = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    return Batch({"token_ids": token_ids, "targets": targets}, rows, targets)
