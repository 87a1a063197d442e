"""Losses of tokens in pieces are those of all logits, values and gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from smat.models.sequence_model import ModelConfig
from smat.models.token_losses import token_losses
from smat.tasks import LanguageModelling


def both(max_logits, dtype, bias=True):
    """Return losses and gradients, in pieces and from all logits."""
    torch.manual_seed(0)
    head = nn.Linear(16, 37, bias=bias).to(dtype)
    hidden = torch.randn(2, 25, 16, dtype=dtype, requires_grad=True)
    targets, weight = torch.randint(37, (2, 25)), torch.randn(2, 25)
    parameters = [hidden, *head.parameters()]
    pieces = token_losses(hidden, head, targets, max_logits)
    logits = head(hidden).float().flatten(0, 1)
    whole = functional.cross_entropy(logits, targets.flatten(), reduction="none").view(2, 25)
    return [
        (each, torch.autograd.grad((each * weight).sum(), parameters)) for each in (pieces, whole)
    ]


@pytest.mark.parametrize("max_logits", [1, 37 * 7, 1 << 20])
@pytest.mark.parametrize("bias", [True, False])
def test_pieces_are_the_whole(max_logits, bias):
    (losses, gradients), (whole, expected) = both(max_logits, torch.float32, bias)
    torch.testing.assert_close(losses, whole)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-2)])
def test_losses_and_gradients_are_as_wide_as_they_can_be(dtype, close):
    torch.manual_seed(0)
    head, exact = nn.Linear(16, 37, bias=False, dtype=dtype), nn.Linear(16, 37, bias=False)
    exact.double().load_state_dict(head.state_dict())
    hidden, targets = torch.randn(3000, 16, dtype=dtype), torch.randint(37, (3000,))
    losses = token_losses(hidden, head, targets, 37 * 3)  # 1000 pieces
    assert losses.dtype == torch.promote_types(dtype, torch.float32)
    expected = functional.cross_entropy(exact(hidden.double()), targets, reduction="sum")
    (found,) = torch.autograd.grad(losses.sum(), head.weight)
    (right,) = torch.autograd.grad(expected, exact.weight)
    assert abs(losses.double().sum() / expected - 1) < close
    assert (found - right).norm() / right.norm() < close


def test_no_more_logits_are_held_than_allowed():
    shapes = []

    class Watched(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if function is functional.linear:
                shapes.append(out.numel())
            return out

    with Watched():
        both(37 * 7, torch.float32)
    assert shapes[:8] == [37 * 7] * 7 + [37]


def test_a_model_with_targets_gives_the_losses_of_its_logits(prepared):
    task = LanguageModelling(seq_len=32, eval_length=64)
    torch.manual_seed(0)
    model = ModelConfig("mamba2", 32, 2, {"head_dim": 16, "state_dim": 8}, tied=True).build(task)
    batch = task.train_batch(0, 3, seed=0)
    losses = model(rows=batch.rows, **batch.inputs)
    logits = model(token_ids=batch.inputs["token_ids"])
    expected = functional.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
    torch.testing.assert_close(losses, expected)
    assert task.loss(losses, batch) == losses.mean()
