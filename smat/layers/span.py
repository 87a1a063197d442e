"""What a layer knows of the tokens of one call: padding, packing, and the states before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smat.masks import SMatMask


@dataclass(frozen=True)
class MixerCache:
    """What one layer carries from token to token: how many there were, and its states.

    >>> cache = MixerCache(torch.tensor([5, 7]), {"conv": torch.zeros(2, 3, 8)})
    >>> cache.select([1, 1, 0]).num_tokens
    tensor([7, 7, 5])
    """

    num_tokens: Tensor  # (B,)
    parts: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.parts[name]

    def __len__(self) -> int:
        return len(self.num_tokens)

    def select(self, index: Tensor | Sequence[int]) -> MixerCache:
        """Take batch rows, in any order and any number of times: beam search."""
        rows = torch.as_tensor(index, dtype=torch.long, device=self.num_tokens.device)
        parts = {name: _select(part, rows) for name, part in self.parts.items()}
        return MixerCache(self.num_tokens[rows], parts)


def _select(part: Any, rows: Tensor) -> Any:
    if part is None or isinstance(part, SMatMask):
        return part
    if isinstance(part, Tensor):
        return part[rows]
    if isinstance(part, tuple):
        chosen = [_select(each, rows) for each in part]
        return type(part)(*chosen) if hasattr(part, "_fields") else tuple(chosen)
    return part.select(rows)


@dataclass(frozen=True)
class Span:
    """The tokens of one call: which are real, where sequences begin, what came before.

    Real tokens stand in front, so that a causal layer meets padding only behind all that counts.
    """

    batch: int
    length: int
    device: torch.device
    real: Tensor | None = None  # (B, T), or None for all
    cu_seqlens: Tensor | None = None
    past: MixerCache | None = None
    use_cache: bool = False
    inplace: bool = False
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def lengths(self) -> Tensor | None:
        """The number of real tokens of each row, or None if all are."""
        return None if self.real is None else self.real.sum(1)

    @property
    def single(self) -> bool:
        """Whether this is one real token a row after others: a step of decoding."""
        return self.length == 1 and self.past is not None and self.real is None

    @property
    def rows(self) -> Tensor | None:
        """The positions (R,) at which outputs are wanted, or None for all of them."""
        return self.extras.get("positions")

    def part(self, name: str) -> Any:
        """Return a state that the last call left, if there was one."""
        return None if self.past is None else self.past[name]

    def quiet(self, gate: Tensor) -> Tensor:
        """Close a gate (B, T, ...) at padding, so that a padded token changes no state."""
        if self.real is None:
            return gate
        return gate.masked_fill(~self.real.view(*self.real.shape, *[1] * (gate.ndim - 2)), 0)

    def positions(self) -> Tensor:
        """Count the tokens before each one in its own sequence, (B, T) or (1, T)."""
        token = torch.arange(self.length, device=self.device).unsqueeze(0)
        if self.cu_seqlens is not None:
            edges = self.cu_seqlens.long()
            return token - edges[:-1].repeat_interleave(edges.diff())
        return token if self.past is None else self.past.num_tokens.unsqueeze(1) + token

    def first_visible(self, mask: SMatMask | None = None) -> Tensor | None:
        """Return the first token that each may look back to, or None if nothing limits it.

        The start of its sequence, or its boundary under `mask`; counted from the first token of
        this call, so that a token of an earlier call has a negative number.
        """
        if mask is None and self.cu_seqlens is None:
            return None
        positions = self.positions()
        first = torch.arange(self.length, device=self.device) - positions
        if mask is None:
            return first
        length = int(positions.max()) + 1
        return first + mask.boundaries(length, self.device)[positions]

    def cache(self, **parts: Any) -> MixerCache | None:
        """Collect the states after this call, if they were asked for."""
        if not self.use_cache:
            return None
        if self.cu_seqlens is not None:
            return MixerCache(self.cu_seqlens.long().diff(), parts)
        new = self.lengths
        if new is None:
            new = torch.full((self.batch,), self.length, device=self.device)
        return MixerCache(new if self.past is None else self.past.num_tokens + new, parts)
