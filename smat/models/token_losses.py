"""The loss of every token of a large vocabulary, with the logits of a few tokens at a time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

MAX_LOGITS = 1 << 24  # held at once


def token_losses(
    hidden: Tensor, head: nn.Linear, targets: Tensor, max_logits: int = MAX_LOGITS
) -> Tensor:
    """Return the cross-entropy of every target (...), from hidden states (..., width).

    >>> head = nn.Linear(8, 1000)
    >>> token_losses(torch.randn(2, 50, 8), head, torch.randint(1000, (2, 50))).shape
    torch.Size([2, 50])

    Equals ``cross_entropy(head(hidden), targets, reduction="none")``, in fp32 or wider. Where that
    has more than `max_logits` logits they are made a piece at a time, and once more for the
    gradient; the gradients of pieces are added up in fp32 or wider too.
    """
    wide = torch.promote_types(head.weight.dtype, torch.float32)
    weight, bias = head.weight.to(wide), None if head.bias is None else head.bias.to(wide)
    size = max(1, max_logits // head.out_features)
    rows = hidden.flatten(0, -2).split(size)
    pieces = list(zip(rows, targets.flatten().split(size), strict=True))
    if len(pieces) == 1:
        return _losses(*pieces[0], weight, bias).view(targets.shape)
    losses = [
        checkpoint(_losses, *piece, weight, bias, use_reentrant=False, preserve_rng_state=False)
        for piece in pieces
    ]  # fmt: skip
    return torch.cat(losses).view(targets.shape)


def _losses(rows: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    weight, bias = weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)
    logits = functional.linear(rows, weight, bias)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return functional.cross_entropy(logits.to(wide), targets, reduction="none")
