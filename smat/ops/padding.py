"""Padding that is exact: real tokens move to the front, padding writes, decays and counts nothing."""

from __future__ import annotations

import torch
from torch import Tensor


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

    def remove(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        key_gate: Tensor | None,
        write_weight: Tensor | None,
        profile: Tensor | None,
        query_type: Tensor | None,
    ) -> tuple[
        Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None,
        Tensor | None,
    ]:  # fmt: skip
        """Move real tokens to the front and make the rest an identity: key gate 0, decay 1."""
        if self.real is None:
            return q, k, v, log_decay, key_gate, write_weight, profile, query_type
        gone = (~self.front(self.real)).unsqueeze(-1)
        if key_gate is None:
            key_gate = torch.ones(k.shape[:3], dtype=v.dtype, device=v.device)

        def keep(x: Tensor) -> Tensor:
            hidden = gone if x.ndim == 3 else gone.unsqueeze(-1)
            return self.front(x).masked_fill(hidden, 0)

        def maybe(x: Tensor | None) -> Tensor | None:
            return None if x is None else keep(x)

        key_gate = self.front(key_gate).masked_fill(gone, 0)
        return (
            keep(q), keep(k), keep(v), maybe(log_decay), key_gate, maybe(write_weight),
            maybe(profile), maybe(query_type),
        )  # fmt: skip

    def restore(self, out: Tensor) -> Tensor:
        """Move outputs back to their tokens, 0 at padding."""
        if self.real is None:
            return out
        assert self.order is not None
        row = torch.arange(len(out), device=out.device)[:, None]
        back = out[row, self.order.argsort(dim=1)]
        return back.masked_fill(~self.real[..., None, None], 0)
