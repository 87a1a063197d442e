"""A task, a model and an experiment small enough to be trained in a test, in any process."""

import os
import signal
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from smat.tasks.task import Batch, Task, generator_of


def changed(config, **changes):
    """Make a configuration anew, and so check it, with other values in some fields."""
    return type(config)(**dict(config) | changes)


@dataclass(frozen=True)
class Parity(Task):
    """Tell the parity of two marked bits."""

    name: ClassVar[str] = "parity"
    scored_splits: ClassVar[tuple[str, ...]] = ("test",)
    length: int = 6
    step_seconds: float = 0.0  # makes a run long enough to be interrupted
    nan_at: int = -1
    die_at: int = -1

    vocab_size = 2
    payload_dim = 0
    num_outputs = 2

    @property
    def max_length(self):
        return self.length

    def train_batch(self, step, batch_size, seed):
        if self.step_seconds:
            time.sleep(self.step_seconds)
        if step == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = self._batch(batch_size, "train", seed, step)
        if step == self.nan_at:
            batch.inputs["scale"].fill_(float("nan"))
        return batch

    def steps_per_epoch(self, batch_size):
        return None

    def eval_batches(self, seed, split="test"):
        for index in range(2):
            yield self._batch(64, split, seed, index)

    def _batch(self, size, *parts):
        bits = torch.randint(2, (size, self.length), generator=generator_of("parity", *parts))
        rows = torch.full((size, 1), self.length - 1)
        cell = f"index={parts[-1] % 2}"
        inputs = {"token_ids": bits, "scale": torch.ones(size)}
        return Batch(inputs, rows, (bits[:, :1] + bits[:, 1:2]) % 2, cell)

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten())

    def score(self, outputs, batch):
        return (outputs.argmax(-1) == batch.targets).float().mean(1)

    def controls(self):
        return {"chance": 50.0}

    def describe(self):
        return "The parity of the first two bits."


@dataclass(frozen=True)
class TinyConfig:
    """The model's size; the runner builds a model of a foreign configuration through `build`."""

    width: int = 16
    dropout: float = 0.1

    def build(self, task):
        return Tiny(self.width, self.dropout, task)


class Tiny(nn.Module):
    def __init__(self, width, dropout, task):
        super().__init__()
        self.embed = nn.Embedding(task.vocab_size, width)
        self.hidden = nn.Linear(width * task.max_length, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, task.num_outputs)
        self.D = nn.Parameter(torch.ones(2, width))

    def forward(self, token_ids, scale, rows=None):
        hidden = self.hidden(self.embed(token_ids).flatten(1)) * scale[:, None]
        self.spread = hidden.square().mean()
        return self.head(self.drop(self.norm(hidden).relu()) * self.D[0])[:, None]

    def balance_loss(self):
        return self.spread
