"""A sequence over several ranks: who holds which tokens, and what they hand to each other."""

from smat.distributed.shares import (
    Piece,
    Share,
    active_share,
    context_parallel,
    open_contexts,
)

__all__ = ["Piece", "Share", "active_share", "context_parallel", "open_contexts"]
