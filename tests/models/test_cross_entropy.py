"""The loss of a large vocabulary equals the plain one, and never holds all of its logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from smat.models import cross_entropy
from smat.models.cross_entropy import summed_cross_entropy


def draw(dtype=torch.float64, tokens=30, width=8, vocab=50):
    torch.manual_seed(0)
    hidden = torch.randn(2, tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, width, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocab, (2, tokens))
    labels[0, :7] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("tile", [1, 333, 1 << 24])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_value_and_gradients_are_those_of_torch(tile, dtype, close, monkeypatch):
    monkeypatch.setattr(cross_entropy, "TILE_LOGITS", tile)
    hidden, weight, labels = draw(dtype)
    found = summed_cross_entropy(hidden, weight, labels)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = F.cross_entropy(
        (exact[0] @ exact[1].T).flatten(0, 1), labels.flatten(), reduction="sum"
    )
    torch.testing.assert_close(found.double(), expected, rtol=close, atol=0)
    for x, y in zip(
        torch.autograd.grad(3 * found, (hidden, weight)),
        torch.autograd.grad(3 * expected, exact),
        strict=True,
    ):
        assert (x - y).norm() / y.norm() < 10 * close


def test_gradients_agree_with_differences():
    hidden, weight, labels = draw(tokens=4)
    assert torch.autograd.gradcheck(
        lambda x, w: summed_cross_entropy(x, w, labels), (hidden, weight)
    )


def test_labels_that_all_count_for_nothing_cost_nothing():
    hidden, weight, labels = draw()
    loss = summed_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss == 0
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


class Largest(TorchDispatchMode):
    """Note the largest tensor that any operation makes."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            self.size = max(self.size, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_no_tensor_has_the_logits_of_all_tokens(monkeypatch):
    monkeypatch.setattr(cross_entropy, "TILE_LOGITS", 500)
    hidden, weight, labels = draw()
    with Largest() as seen:
        summed_cross_entropy(hidden, weight, labels).backward()
    assert 500 <= seen.size <= 2 * 30 * 50 // 5
