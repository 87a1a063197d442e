"""Who holds which tokens of a sequence: shares of ranks, in order, and the pieces of packed ones.

Every rank of a group holds a run of tokens, its share. Whatever mixes tokens asks for the active
share and exchanges with its neighbours what they need of each other (`exchange.py`); everything
else works on a rank's own tokens and does not notice.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class Piece(NamedTuple):
    """What a rank holds of one sequence: its own tokens start .. stop, `offset` come before."""

    start: int
    stop: int
    offset: int
    length: int  # of the whole sequence

    @property
    def end(self) -> int:
        """The number of the sequence's tokens up to the end of the piece."""
        return self.offset + self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether no other rank holds a part of the sequence."""
        return self.offset == 0 and self.end == self.length


@dataclass(frozen=True)
class Share:
    """The tokens start .. stop of all that a group of ranks holds together.

    >>> share = Share(None, rank=1, edges=(0, 3, 8, 10))
    >>> share.start, share.stop, share.total
    (3, 8, 10)
    >>> share.pieces([0, 4, 5, 10])
    [Piece(start=0, stop=1, offset=3, length=4), Piece(start=1, stop=2, offset=0, length=1),
     Piece(start=2, stop=5, offset=0, length=5)]
    """

    group: Any  # a process group; None is the one of all ranks
    rank: int
    edges: tuple[int, ...]  # of the shares of all ranks, from 0
    sent: Counter[str] = field(default_factory=Counter, compare=False)  # bytes, by what they are

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.edges) - 1

    @property
    def start(self) -> int:
        return self.edges[self.rank]

    @property
    def stop(self) -> int:
        return self.edges[self.rank + 1]

    @property
    def total(self) -> int:
        """The number of tokens of all ranks."""
        return self.edges[-1]

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """Take this rank's tokens of something that all ranks have whole."""
        return x.narrow(dim, self.start, self.stop - self.start)

    def pieces(self, cu_seqlens: Sequence[int] | None = None) -> list[Piece]:
        """List what this rank holds of each sequence; of one unless several are packed."""
        edges = [0, self.total] if cu_seqlens is None else cu_seqlens
        if edges[0] != 0 or edges[-1] != self.total or sorted(edges) != list(edges):
            raise ValueError(
                f"cu_seqlens must rise from 0 to the {self.total} tokens of all {self.size} ranks, "
                f"got {list(edges)}"
            )
        found = []
        for first, last in itertools.pairwise(edges):
            start, stop = max(first, self.start), min(last, self.stop)
            if start < stop:
                found.append(
                    Piece(start - self.start, stop - self.start, start - first, last - first)
                )
        return found


class _Ranks:
    """The ranks of a context, and the shares that they hold of sequences."""

    def __init__(self, group: Any, shares: Sequence[int] | None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError("context parallelism needs torch.distributed.init_process_group")
        mesh_group = getattr(group, "get_group", None)
        self.group = group if mesh_group is None else mesh_group()
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError("this process is not a rank of the group")
        if shares is not None and (len(shares) != self.size or min(shares) < 1):
            raise ValueError(f"{self.size} ranks need {self.size} shares of 1 or more tokens, "
                             f"got {list(shares)}")  # fmt: skip
        self.shares = None if shares is None else [int(each) for each in shares]
        self.known: dict[int, Share] = {}
        self.sent: Counter[str] = Counter()

    def share(self, length: int, device: torch.device) -> Share:
        """Return the share of a call with so many tokens; the ranks tell each other theirs."""
        if length not in self.known:
            lengths = self.shares
            if lengths is None:
                own = torch.tensor([length], device=device)
                gathered = [torch.empty_like(own) for _ in range(self.size)]
                dist.all_gather(gathered, own, group=self.group)
                lengths = [int(each) for each in gathered]
            if lengths[self.rank] != length:
                raise ValueError(
                    f"rank {self.rank} was given {length} tokens, but shares are {lengths}"
                )
            edges = (0, *itertools.accumulate(lengths))
            self.known[length] = Share(self.group, self.rank, edges, self.sent)
        return self.known[length]


# Not a context variable: autograd's threads, which recompute checkpoints, see it too.
open_contexts: list[_Ranks] = []


@contextmanager
def context_parallel(group: Any = None, shares: Sequence[int] | None = None) -> Iterator[_Ranks]:
    """Let every sequence in this block be one that the ranks of a group hold together.

    >>> import smat
    >>> with smat.context_parallel():
    ...     pass
    Traceback (most recent call last):
    RuntimeError: context parallelism needs torch.distributed.init_process_group

    `group` is a process group or a mesh of one dimension, such as ``mesh["cp"]``; None is the group
    of all ranks. Ranks hold consecutive tokens, the first rank the first ones, and call the same
    operations and layers in the same order, each on its own tokens: as many as `shares` says, or
    as each has. Gradients pass between them: all ranks must call backward. ``cu_seqlens`` counts
    the tokens of all ranks. A state or cache is the one after a rank's own tokens, so that the last
    rank's decodes on, outside of this block. Checkpointed layers need the block around backward.
    """
    open_contexts.append(_Ranks(group, shares))
    try:
        yield open_contexts[-1]
    finally:
        open_contexts.pop()


def active_share(x: Tensor, group: Any = None) -> Share | None:
    """Return this rank's share of a call with tokens (B, T, ...), None outside of a context.

    A call may name its group itself.
    """
    if group is not None:
        return _Ranks(group, None).share(x.shape[1], x.device)
    return open_contexts[-1].share(x.shape[1], x.device) if open_contexts else None
