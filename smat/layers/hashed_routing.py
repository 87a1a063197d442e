"""Routing by a fixed hash of token ids: the content-based assignment without parameters."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from smat.geometry import Geometry
from smat.layers.selectors import point_mask
from smat.layers.short_convolution import last_inputs, with_past
from smat.layers.span import Span
from smat.masks import SMatMask, TokenHash, agreeing_direction, type_through_cell


class Assignment(NamedTuple):
    """Where tokens write and which type they read; None leaves it to their position."""

    profile: Tensor | None = None  # (B, T, H)
    query_type: Tensor | None = None  # (B, T, H), or (B, T, H, k) with read weights
    write_weight: Tensor | None = None  # (B, T, H), the straight-through weight of a learned hash
    read_weight: Tensor | None = None  # (B, T, H, k)


class Routing(Protocol):
    """What `SMatAttention` asks of a routing module."""

    looks_at_states: bool  # whether x below matters

    def read_mask(self, mask: SMatMask) -> SMatMask:
        """Return the mask under which the types are read."""

    def __call__(self, x: Tensor, mask: SMatMask, span: Span) -> tuple[Assignment, Any]:
        """Assign the tokens of a span; ``span.part("routing")`` is the state before them.

        What is read is told for ``span.rows`` alone, if there are any.
        """


class PositionalRouting(nn.Module):
    """Profiles and types dealt out in turn.

    >>> span = Span(1, 3, torch.device("cpu"))
    >>> PositionalRouting()(torch.randn(1, 3, 8), SMatMask(128, 2), span)
    (Assignment(profile=None, query_type=None, write_weight=None, read_weight=None), None)
    """

    looks_at_states = False

    def read_mask(self, mask: SMatMask) -> SMatMask:
        """Return the mask under which the types are read."""
        return mask

    def forward(self, x: Tensor, mask: SMatMask, span: Span) -> tuple[Assignment, None]:
        """Leave everything to the positions."""
        return Assignment(), None


class HashedRouting(nn.Module):
    """Every token writes to the cell that its id hashes to, and reads a hyperplane through it.

    >>> mask = SMatMask(64, vc_dim=3, chunk_size=16, field_size=3)
    >>> ids = torch.tensor([[5, 9, 5, 7]])
    >>> span = Span(1, 4, ids.device, extras={"token_ids": ids})
    >>> routing = HashedRouting(vocab_size=16, num_heads=2)
    >>> assignment, _ = routing(torch.randn(1, 4, 8), mask, span)
    >>> torch.equal(assignment.profile[:, 0], assignment.profile[:, 2])
    True

    A token writes to the cell of the token `write_lag` before it (1 files a value under its key),
    its own where there is none. The direction is one that the cells of the last `num_keys` tokens
    agree on, if there is one (the rule of multi-key recall), or hashed too if `num_keys` is 1;
    ``query_direction`` (B, T, H) as an argument of the layer replaces it. `point_read` reads the
    own cell alone: LSH bucketing.

    Paper: u_t is the cell, a the direction, type(i) = H_(a, a . u).
    """

    looks_at_states = False

    def __init__(
        self,
        vocab_size: int,
        num_heads: int,
        *,
        write_lag: int = 0,
        num_keys: int = 1,
        point_read: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if write_lag < 0 or num_keys < 1:
            raise ValueError(f"write_lag >= 0 and num_keys >= 1, got {write_lag} and {num_keys}")
        self.vocab_size, self.num_heads, self.seed = vocab_size, num_heads, seed
        self.write_lag, self.num_keys, self.point_read = write_lag, num_keys, point_read
        self.num_kept = max(write_lag, num_keys - 1)

    def read_mask(self, mask: SMatMask) -> SMatMask:
        """Return the mask under which the types are read: at d = 2 a hyperplane is a cell."""
        return point_mask(mask) if self.point_read else mask

    def forward(self, x: Tensor, mask: SMatMask, span: Span) -> tuple[Assignment, Tensor | None]:
        """Route the tokens of a span by their ``token_ids``; the state is the last ids."""
        ids = span.extras.get("token_ids")
        if ids is None or tuple(ids.shape) != (span.batch, span.length):
            shape = None if ids is None else tuple(ids.shape)
            raise ValueError(
                f"hashed routing needs token_ids (B, T) = {(span.batch, span.length)}, got {shape}"
            )
        past = span.part("routing")
        history = with_past(ids, self.num_kept, past)
        table = TokenHash(self.vocab_size, self.num_heads, mask.geometry, self.seed)
        cell = table.profile(ids)
        written = table.profile(self._before(history, ids, self.write_lag, span))
        rows = slice(None) if span.rows is None else span.rows
        query_type = cell[:, rows]
        if not self.point_read:
            query_type = self._types(mask.geometry, history, ids, span, query_type, rows)
        state = None
        if span.use_cache:
            state = last_inputs(ids, self.num_kept, past, span.lengths, span.cu_seqlens)
        return Assignment(written, query_type), state

    def _types(
        self,
        geometry: Geometry,
        history: Tensor,
        ids: Tensor,
        span: Span,
        cell: Tensor,
        rows: slice | Tensor,
    ) -> Tensor:
        """Return the types that rows read, whose own cells are given."""
        table = TokenHash(self.vocab_size, self.num_heads, geometry, self.seed)
        direction = span.extras.get("query_direction")
        if direction is not None:
            direction = direction[:, rows]
        elif self.num_keys == 1:
            hashed = TokenHash(self.vocab_size, self.num_heads, geometry, self.seed + 1)
            direction = hashed.profile(ids[:, rows]) % geometry.num_directions
        else:
            tokens = [self._before(history, ids, lag, span) for lag in range(self.num_keys)]
            cells = torch.stack([table.profile(token[:, rows]) for token in tokens], -1)
            direction, _ = agreeing_direction(geometry, cells)
        return type_through_cell(geometry, direction, cell)

    def _before(self, history: Tensor, ids: Tensor, lag: int, span: Span) -> Tensor:
        """Return the id `lag` tokens earlier in the same sequence, the own one where none is."""
        start = self.num_kept - lag
        return torch.where(span.positions() >= lag, history[:, start : start + span.length], ids)
