"""Which tokens visit which memories of a mixture, and in what order: `MixtureOfMemories`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

SPARE_VISITS = 8  # of padding behind a sequence, which cost no more than another product


class Sequences(NamedTuple):
    """Sequences of about the same length, side by side."""

    memory: Tensor  # (n,)
    row: Tensor  # (n,), of the batch
    lengths: Tensor  # (n,)
    place: Tensor  # (n, L), of each token among the sorted visits
    padding: Tensor  # (n, L), True behind the last token of a sequence


class Visits:
    """Tokens (B, T) that visit k memories each, ``memory`` (B, T, k), in the order of their time.

    >>> visits = Visits(torch.tensor([[[0, 1], [1, 2], [1, 0]]]), num_memories=3)
    >>> visits.token, [some.lengths.tolist() for some in visits.sequences()]
    (tensor([0, 2, 0, 1, 2, 1]), [[3, 2, 1]])

    Visits are sorted by memory, then batch row, then time: those of a memory stand together for its
    projections, and those of a memory and row are a sequence. Padding, which stands behind the real
    tokens of a row, visits nothing. All work is O(T k), however unevenly memories are visited.
    """

    def __init__(self, memory: Tensor, num_memories: int, real: Tensor | None = None) -> None:
        self.batch, _, self.num_reads = memory.shape
        self.num_memories, self.device = num_memories, memory.device
        num_sequences = num_memories * self.batch
        row = torch.arange(self.batch, device=self.device)
        entry = memory * self.batch + row[:, None, None]
        if real is not None:
            entry = entry.masked_fill(~real.unsqueeze(-1), num_sequences)
        entry = entry.flatten()
        self.counts = torch.bincount(entry, minlength=num_sequences + 1)[:num_sequences]
        num_visits = len(entry) if real is None else int(self.counts.sum())
        self.order = entry.argsort(stable=True)[:num_visits]
        self.token = self.order // self.num_reads
        self.num_tokens = memory.shape[0] * memory.shape[1]

    def project(self, x: Tensor, bank: Tensor) -> Tensor:
        """Multiply every visitor (B, T, f) by its memory's matrix (M, f, g): sorted, (V, g)."""
        per_memory = self.counts.view(self.num_memories, -1).sum(1).tolist()
        visitors = x.flatten(0, 1)[self.token].split(per_memory)
        pairs = zip(visitors, bank.to(x.dtype).unbind(), strict=True)
        return torch.cat([some @ matrix for some, matrix in pairs if len(some)])

    def sequences(self) -> Iterator[Sequences]:
        """Give the sequences that are not empty, side by side where padding costs little.

        Of those that stand together the shortest has three quarters of the longest one's length.
        """
        offset = self.counts.cumsum(0) - self.counts
        lengths, sequence = self.counts.sort(descending=True)
        sizes = lengths[lengths > 0].tolist()
        first = 0
        while first < len(sizes):
            width, last = sizes[first], first + 1
            while last < len(sizes) and sizes[last] >= min(0.75 * width, width - SPARE_VISITS):
                last += 1
            some, token = sequence[first:last], torch.arange(width, device=self.device)
            place = (offset[some].unsqueeze(1) + token).clamp(max=len(self.token) - 1)
            memory, row, count = some // self.batch, some % self.batch, self.counts[some]
            yield Sequences(memory, row, count, place, token >= count.unsqueeze(1))
            first = last

    def collect(self, sequences: list[Sequences], answers: list[Tensor]) -> Tensor:
        """Give what sequences (n, L, ...) say back to their tokens, (B T, k, ...), 0 at padding."""
        spare = self.num_tokens * self.num_reads  # the place of padding
        target = [self.order[x.place].masked_fill(x.padding, spare).flatten() for x in sequences]
        said = torch.cat([answer.flatten(0, 1) for answer in answers])
        found = said.new_zeros(spare + 1, *said.shape[1:]).index_copy(0, torch.cat(target), said)
        return found[:-1].unflatten(0, (-1, self.num_reads))
