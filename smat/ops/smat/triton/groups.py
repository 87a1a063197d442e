"""Tokens that share a table entry, as programs visit them (torch form: `smat.ops.smat.groups`).

A visit is one read of one query, or one write of one key. A program works off a block of visits to
one entry. Of positional groups token and block follow from each other; routed visits are sorted on
the device, and their blocks are listed there, in arrays whose sizes follow from shapes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_VISITS = 256  # at most, of one program


class Visits(NamedTuple):
    """The visits of tokens start .. stop to a table, by groups; of HEADS heads of a row together.

    Positional visits to few entries have several groups to an entry: group g is of entry g mod
    `num_entries`.
    """

    num_entries: int
    start: int
    stop: int
    heads: int = 1  # of queries, that share a row
    reads: int = 1
    num_groups: int = 0  # positional: token t is of group (t + shift) mod num_groups
    phase: int = 0  # the group of the first token
    order: Tensor | None = None  # (rows, visits), routed: visits sorted by entry
    blocks: Tensor | None = None  # (rows, blocks, 4): entry, entry of a pool, first visit, visits
    last: Tensor | None = None  # (rows, entries), the number of blocks up to each entry's last

    @classmethod
    def positional(
        cls, num_entries: int, start: int, stop: int, shift: int, heads: int = 1, most: int = 0
    ) -> Visits:
        """Let token t visit entry (t + shift) mod `num_entries`; of calls with `most` tokens.

        Calls that pool into one table need the same groups.
        """
        visits = triton.cdiv(max(most, stop - start), num_entries) * heads
        num_groups = num_entries * triton.cdiv(visits, BLOCK_VISITS)
        phase = (start + shift) % num_groups
        return cls(num_entries, start, stop, heads, 1, num_groups, phase)

    @classmethod
    def routed(cls, entry: Tensor, num_entries: int, start: int, heads: int = 1) -> Visits:
        """Take the entries (rows, t, heads, reads) that each head of each token names."""
        num_rows, length = entry.shape[:2]
        entry = entry.reshape(num_rows, -1).contiguous()  # and so is what is made like it
        num_visits = entry.shape[1]
        count = entry.new_zeros(num_rows, num_entries)
        count.scatter_add_(1, entry, torch.ones_like(entry))
        blocks = ((count + BLOCK_VISITS - 1) // BLOCK_VISITS).clamp(min=1)
        last = blocks.cumsum(1)
        number = torch.arange(num_entries + num_visits // BLOCK_VISITS, device=entry.device)
        number = number.expand(num_rows, -1).contiguous()
        found = torch.searchsorted(last, number, right=True)
        group = found.clamp(max=num_entries - 1)
        within = number - (last - blocks).gather(1, group)
        begin = (count.cumsum(1) - count).gather(1, group) + within * BLOCK_VISITS
        visits = (count.gather(1, group) - within * BLOCK_VISITS).clamp(max=BLOCK_VISITS)
        onto = torch.where(within == 0, group, num_entries + number - group - 1)
        unused = found == num_entries
        listed = torch.stack([group, onto.masked_fill(unused, -1), begin, visits], -1)
        listed[..., 3].masked_fill_(unused, 0)
        reads = num_visits // max(1, length * heads)
        order = entry.argsort(dim=1, stable=True)
        return cls(
            num_entries, start, start + length, heads, reads,
            order=order, blocks=listed, last=last,
        )  # fmt: skip

    @property
    def num_blocks(self) -> int:
        """Of one row."""
        return self.num_groups if self.blocks is None else self.blocks.shape[1]

    @property
    def num_pooled(self) -> int:
        """Entries that a pool writes: blocks behind an entry's first have entries of their own."""
        return self.num_blocks

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What kernels take."""
        num_visits = 0 if self.order is None else self.order.shape[1]
        return (
            self.order, self.blocks, num_visits, self.num_blocks, self.num_entries, self.start,
            self.stop, self.num_groups, self.phase,
        )  # fmt: skip


@triton.jit
def find_block(
    blocks, number, first_row, num_blocks, num_entries, start, stop, num_groups, phase,
    HEADS: tl.constexpr, POOL: tl.constexpr,
):  # fmt: skip
    """Find a block's row and entry, first token (routed: first visit), and number of visits."""
    block = number % num_blocks
    row = first_row + number // num_blocks
    if blocks is None:
        entry = block if POOL else block % num_entries
        begin = start + (block - phase + num_groups) % num_groups
        visits = tl.maximum(stop - begin + num_groups - 1, 0) // num_groups * HEADS
    else:
        blocks += (row * num_blocks + block) * 4
        entry = tl.load(blocks + (1 if POOL else 0))
        begin = tl.load(blocks + 2)
        visits = tl.load(blocks + 3)
    return row, entry, begin, visits


@triton.jit
def find_visits(
    order, row, num_visits, begin, index, inside, start, num_groups, num_rows, length,
    HEADS: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """Find token, head and number of the read of some visits, and where their numbers lie."""
    if order is None:
        token = begin + (index // HEADS).to(tl.int64) * num_groups
        head = index % HEADS
        read = head * 0
    else:
        visit = tl.load(order + row * num_visits + begin + index, mask=inside, other=0)
        token = start + visit // (HEADS * READS)
        head = visit // READS % HEADS
        read = visit % READS
    head += row % num_rows * HEADS
    own = (row // num_rows * length + token) * (num_rows * HEADS) + head
    return token, head, read, own
