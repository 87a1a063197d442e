"""Subset routing: a query that sits on a row of the mask asks for a subset of k landmarks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from smat.masks import SMatMask, count_traces_of_sets
from smat.tasks.task import SAMPLING_ERROR, Batch, Task, generator_of

NUM_CANDIDATES = 96  # random distant positions among which a further landmark is chosen


@dataclass(frozen=True)
class SubsetRouting(Task):
    """Return the payloads of the requested landmarks and nothing of the others.

    >>> task = SubsetRouting(num_landmarks=3, vc_dim=2)
    >>> batch = task.train_batch(step=0, batch_size=64, seed=0)
    >>> batch.inputs["payload"].shape, batch.rows.shape, batch.targets.shape
    (torch.Size([64, 3]), torch.Size([64, 1]), torch.Size([64, 1, 3]))
    >>> task.num_realised, round(task.controls()["expected ceiling"], 1)
    (7, 86.3)

    Landmark l carries a payload x_l ~ N(0, 1) in channel l, so that a batch gives payloads (B, k)
    and the number of the request (B,), bit l of it for landmark l. The request A is uniform over
    all 2^k subsets; the target is sum over l in A of x_l e_l. It is named by position alone: the
    query is the first row of the mask whose trace on the landmarks is A, or the first row of the
    nearest trace in Hamming distance if no row has it (of equals, one with fewer extras).
    Models without a mask are asked by the causal one, `vc_dim` = 1.

    Landmarks are the witness of the paper's theorem, d - 1 distant positions whose profiles are the
    unit vectors and one recent position behind a full round of types (fewer if k < d); for k > d
    each further one is that of 96 random distant positions which realises the most traces. A row is
    right if the channels above 1 % of the example's largest payload are those of A.
    """

    num_landmarks: int
    vc_dim: int
    seq_len: int = 1024
    chunk_size: int = 128
    content: bool = False  # ask at one row that sees all landmarks; the model is told the request
    num_eval: int = 4096
    landmark_seed: int = 0

    name: ClassVar[str] = "subset_routing"
    vocab_size: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not 1 <= self.num_landmarks <= 16:
            raise ValueError(f"between 1 and 16 landmarks, got {self.num_landmarks}")

    @property
    def payload_dim(self) -> int:
        return self.num_landmarks

    num_outputs = payload_dim

    @property
    def lengths(self) -> tuple[int, ...]:
        return (int(self.rows.max()) + 1,)

    @property
    def mask(self) -> SMatMask:
        """The mask that chooses landmarks and rows."""
        return SMatMask(self.seq_len, self.vc_dim, self.chunk_size)

    @property
    def landmarks(self) -> Tensor:
        """The positions of the landmarks, (k,)."""
        return _landmarks(self.mask, self.num_landmarks, self.landmark_seed)

    @property
    def rows(self) -> Tensor:
        """The row that asks for each subset, (2^k,); bit l of its number is landmark l."""
        rows = _rows(self.mask, self.num_landmarks, self.landmark_seed)[0]
        return rows[-1].expand(len(rows)) if self.content else rows

    @property
    def num_realised(self) -> int:
        """How many of the 2^k subsets are traces of rows; a request in content needs no trace."""
        if self.content:
            return 1 << self.num_landmarks
        return int(_rows(self.mask, self.num_landmarks, self.landmark_seed)[1].sum())

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        return self._draw(batch_size, generator_of(self.name, "train", seed, step))

    def eval_batches(self, seed: int, split: str = "test") -> Iterator[Batch]:
        yield self._draw(self.num_eval, generator_of(self.name, split, seed))

    def _draw(self, num_examples: int, generator: torch.Generator) -> Batch:
        k = self.num_landmarks
        amounts = torch.randn(num_examples, k, generator=generator)
        request = torch.randint(1 << k, (num_examples,), generator=generator)
        targets = amounts * _bits(request, k)
        inputs = {"payload": amounts, "request": request}
        return Batch(inputs, self.rows[request, None], targets[:, None])

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        return (outputs.float() - batch.targets).square().mean()

    def score(self, outputs: Tensor, batch: Batch) -> Tensor:
        threshold = 0.01 * batch.inputs["payload"].abs().amax(-1, keepdim=True)
        # A payload of exactly 0 is drawn with probability 0: the target says what was asked.
        on = outputs[:, 0].abs() > threshold
        return (on == (batch.targets[:, 0] != 0)).all(-1).float()

    def controls(self) -> dict[str, float]:
        k = self.num_landmarks
        visible = _metric_ceiling(k)
        reached = visible * self.num_realised / (1 << k)
        return {
            "expected ceiling of the metric": 100 * visible,
            f"expected ceiling of the metric{SAMPLING_ERROR}": self._sampling_error(visible),
            "expected ceiling": 100 * reached,
            f"expected ceiling{SAMPLING_ERROR}": self._sampling_error(reached),
            "causal rows": 100 * (k + 1) / (1 << k),
        }

    def _sampling_error(self, chance: float) -> float:
        """Return the deviation, in per cent, of what a seed's examples give at this chance."""
        return 100 * (chance * (1 - chance) / self.num_eval) ** 0.5

    def describe(self) -> str:
        return (
            f"k landmarks among {self.seq_len} positions carry random payloads, "
            "and a query asks for a random subset of them by sitting on the row of the mask that "
            "sees exactly this subset (the nearest one if no row does). A row counts as right if "
            "it returns exactly the requested payloads. The expected ceiling is the fraction of "
            "subsets that rows realise, times the chance that every requested payload is large "
            "enough to count; a measured cell may lie above it by the sampling error, the "
            "deviation of one seed's examples that stands behind it. Payloads "
            "are N(0, 1) and requests uniform over all subsets, which "
            "the paper leaves open."
        )


def _bits(number: Tensor, width: int) -> Tensor:
    return (number[..., None] >> torch.arange(width)) & 1 == 1


@lru_cache(maxsize=64)
def _landmarks(mask: SMatMask, count: int, seed: int) -> Tensor:
    recent = mask.num_distant + mask.geometry.num_types
    chosen = [*mask.geometry.basis_profiles().tolist()[: max(0, count - 1)], recent]
    if len(chosen) > count or recent >= mask.seq_len:
        raise ValueError(f"{mask.describe()} has no room for {count} landmarks and their rows")
    support = mask.dense()
    for extra in range(count - len(chosen)):
        generator = generator_of("subset_routing", "landmarks", seed, extra)
        free = torch.randperm(mask.num_distant, generator=generator)
        free = free[~torch.isin(free, torch.tensor(chosen))][:NUM_CANDIDATES]
        sets = torch.cat([torch.tensor(chosen).expand(len(free), -1), free[:, None]], 1)
        best = int(count_traces_of_sets(support, sets).argmax())
        chosen.insert(-1, int(free[best]))
    return torch.tensor(chosen)


@lru_cache(maxsize=64)
def _rows(mask: SMatMask, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the row that asks for each subset, and whether its trace is that subset."""
    trace = mask.dense()[:, _landmarks(mask, count, seed)].long()
    number = (trace << torch.arange(count)).sum(-1)
    first = torch.full((1 << count,), mask.seq_len)
    first.scatter_reduce_(0, number, torch.arange(mask.seq_len), "amin")
    realised = first < mask.seq_len
    traces = realised.nonzero()[:, 0]
    request = torch.arange(1 << count)[:, None]
    differ = _bits(request ^ traces, count).sum(-1)
    extra = _bits(~request & traces, count).sum(-1)  # of equally near traces, the one within A
    return first[traces[(differ * (count + 1) + extra).argmin(-1)]], realised


@lru_cache(maxsize=16)
def _metric_ceiling(count: int, num_draws: int = 1 << 19) -> float:
    """Estimate how often every requested payload is above 1 % of the largest."""
    generator = generator_of("subset_routing", "ceiling", count)
    amounts = torch.randn(num_draws, count, generator=generator).abs()
    wanted = torch.rand(num_draws, count, generator=generator) < 0.5
    seen = amounts > 0.01 * amounts.amax(-1, keepdim=True)
    return float((seen | ~wanted).all(-1).double().mean())
