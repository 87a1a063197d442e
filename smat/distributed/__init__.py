"""Sequences and heads over several ranks: who holds what, and what they hand to each other."""

from smat.distributed.heads import HeadRanks
from smat.distributed.shares import (
    Piece,
    Share,
    active_share,
    context_parallel,
    open_contexts,
)
from smat.distributed.tensor import tensor_parallel

__all__ = [
    "HeadRanks",
    "Piece",
    "Share",
    "active_share",
    "context_parallel",
    "open_contexts",
    "tensor_parallel",
]
