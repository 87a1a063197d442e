"""Accuracy is the mean over cells of each cell's mean, and evaluation leaves a model alone."""

from dataclasses import dataclass

import pytest
import torch
from tiny import Parity, TinyConfig
from torch import nn

from smat.tasks.task import Batch, Task
from smat.training import evaluate


class Echo(nn.Module):
    def forward(self, values, rows):
        return values


@dataclass(frozen=True)
class Counting(Task):
    """Two cells of different size, whose scores are their inputs."""

    name = "counting"
    num_queries: int = 1

    def eval_batches(self, seed, split):
        shape = (self.num_queries, 1)
        for cell, value, size in (("a", 1.0, 2), ("b", 0.0, 4), ("a", 0.25, 6)):
            rows = torch.zeros(size, self.num_queries, dtype=torch.long)
            yield Batch({"values": torch.full((size, *shape), value)}, rows, rows, cell)

    def score(self, outputs, batch):
        return outputs[..., 0] if self.num_queries > 1 else outputs[:, 0, 0]

    def loss(self, outputs, batch):
        return outputs.mean()


@pytest.mark.parametrize("num_queries", [1, 3])
def test_examples_weigh_alike_in_a_cell_and_cells_weigh_alike(num_queries):
    found = evaluate(Echo(), Counting(num_queries), seed=0)
    assert found.by_cell == {"a": pytest.approx(100 * (2 + 6 * 0.25) / 8), "b": 0.0}
    assert found.accuracy == pytest.approx((100 * 3.5 / 8) / 2)
    assert found.loss == pytest.approx((2 * 1.0 + 6 * 0.25) / 12)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_restored_and_dropout_is_off(training):
    task = Parity()
    model = TinyConfig(dropout=0.9).build(task).train(training)
    state = torch.get_rng_state()
    first = evaluate(model, task, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training is training
    assert evaluate(model, task, seed=0) == first
    assert evaluate(model, task, seed=1) != first


def test_an_empty_split_is_refused():
    class Empty(Counting):
        def eval_batches(self, seed, split):
            return iter(())

    with pytest.raises(ValueError, match="counting has no examples in split 'validation'"):
        evaluate(Echo(), Empty(), seed=0, split="validation")
