"""Padding and packing, exactly: real tokens to the front, packed sequences side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smat.ops.smat.routing import Gates, Routing


class Padding:
    """Which tokens of a batch are real, (B, T) with 0 for padding, or None for all of them.

    >>> padding = Padding(torch.tensor([[0, 1, 1], [1, 1, 0]]))
    >>> padding.lengths
    tensor([2, 2])
    >>> padding.front(torch.tensor([[7, 8, 9], [7, 8, 9]]))
    tensor([[8, 9, 7],
            [7, 8, 9]])
    """

    def __init__(self, attention_mask: Tensor | None) -> None:
        self.real = None if attention_mask is None else attention_mask.bool()
        self.lengths = None if self.real is None else self.real.sum(1)
        self.order: Tensor | None = None
        if self.real is not None:
            # A stable sort keeps the order of the real tokens, wherever the padding stands.
            self.order = (~self.real).long().argsort(dim=1, stable=True)

    @property
    def moves(self) -> bool:
        """Whether positions before and after removing the padding may differ."""
        return self.real is not None

    def front(self, x: Tensor) -> Tensor:
        """Move real tokens to the front, (B, T, ...)."""
        assert self.order is not None
        return x[torch.arange(len(x), device=x.device)[:, None], self.order]

    def remove(self, *per_token: Tensor | None) -> tuple[Any, ...]:
        """Move real tokens to the front and put zeros behind them, (B, T, ...): no decay there."""
        if self.real is None:
            return per_token
        gone = ~self.front(self.real)
        return tuple(
            x if x is None else self.front(x).masked_fill(_like(gone, x), 0) for x in per_token
        )

    def remove_all(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Gates, routing: Routing
    ) -> tuple[Tensor, Tensor, Tensor, Gates, Routing]:
        """Remove the padding of all that attention takes.

        The key gate is closed there, so that padding writes nothing whatever the feature map is.
        """
        q, k, v, log_decay, key_gate = self.remove(q, k, v, *gates)
        if key_gate is None and self.real is not None:
            key_gate = self.front(self.real).unsqueeze(-1).expand(k.shape[:3]).to(k.dtype)
        return q, k, v, Gates(log_decay, key_gate), Routing(*self.remove(*routing))

    def restore(self, out: Tensor) -> Tensor:
        """Move outputs back to their tokens, 0 at padding."""
        if self.real is None:
            return out
        assert self.order is not None
        row = torch.arange(len(out), device=out.device)[:, None]
        back = out[row, self.order.argsort(dim=1)]
        return back.masked_fill(_like(~self.real, back), 0)


def _like(real: Tensor, x: Tensor) -> Tensor:
    return real.reshape(*real.shape, *[1] * (x.ndim - 2))


def unpack(x: Any, edges: Sequence[int]) -> Any:
    """Lay packed sequences side by side, (1, T, ...) -> (S, longest, ...), zeros behind each.

    >>> unpack(torch.arange(5)[None], [0, 2, 5])
    tensor([[0, 1, 0],
            [2, 3, 4]])
    """
    if x is None:
        return None
    parts = [x[0, start:stop] for start, stop in itertools.pairwise(edges)]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
