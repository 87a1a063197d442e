"""One share of the work: a few rows of keys with their queries, as contiguous arrays.

A row is one key/value head of one sequence. Rows are taken a few at a time, so that temporaries
stay small and are reused, and every array below lies as the products want it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from smat.masks import Segment, SMatMask
from smat.ops.causal import CausalBranch
from smat.ops.decay import LogDecay
from smat.ops.feature_maps import pointwise_rows
from smat.ops.long_range import LongRangeBranch, Routing
from smat.ops.pieces import Block, cut_blocks

CPU_TOKENS, OTHER_TOKENS = 1 << 16, 1 << 22  # rows x tokens of a share
CPU_TILES, OTHER_TILES = 32, 1 << 12  # tiles of a block
MAX_CHUNKS = 64  # of a block: the scan within it costs their square


@dataclass(frozen=True)
class Inputs:
    """The arguments of the op, whole: k and v (B, T, Hkv, .), gates and profile (B, T, Hkv).

    q (B, R, H, K) and query_type (B, R, H) are there for every token, or for those at the sorted
    positions (R,).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    key_gate: Tensor | None
    write_weight: Tensor | None
    profile: Tensor | None
    query_type: Tensor | None
    positions: Tensor | None
    cu_seqlens: Tensor | None
    mask: SMatMask
    feature_map: str
    normalize: bool
    branch: str  # "both", or one of "causal" and "long_range"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all sums: the inputs', but never less than fp32."""
        return torch.promote_types(self.v.dtype, torch.float32)

    @property
    def group(self) -> int:
        """The number of query heads that share a key head."""
        return self.q.shape[2] // self.k.shape[2]

    def shares(self) -> Iterator[Share]:
        """Cut the work into shares: whole sequences of a few heads or batch rows each."""
        num_batch, num_heads = self.k.shape[0], self.k.shape[2]
        budget = CPU_TOKENS if self.k.device.type == "cpu" else OTHER_TOKENS
        for span, mask in self._sequences():
            length = span.stop - span.start
            heads = max(1, min(num_heads, budget // length))
            batch = max(1, min(num_batch, budget // (length * num_heads)))
            taken, positions = self._queries_in(span)
            for first in range(0, num_batch, batch):
                for head in range(0, num_heads, heads):
                    rows = slice(first, first + batch), slice(head, head + heads)
                    yield Share(self, *rows, span, taken, positions, mask)

    def _sequences(self) -> Iterator[tuple[slice, SMatMask]]:
        if self.cu_seqlens is None:
            if self.k.shape[0] and self.k.shape[1]:
                yield slice(0, self.k.shape[1]), self.mask
            return
        edges = self.cu_seqlens.tolist()
        for start, stop in itertools.pairwise(edges):
            if stop > start:
                yield slice(start, stop), self.mask.for_length(stop - start)

    def _queries_in(self, span: slice) -> tuple[slice, Tensor | None]:
        """Say which queries belong to a sequence, and where in it they stand if not everywhere."""
        if self.positions is None:
            return span, None
        edges = torch.tensor([span.start, span.stop], device=self.positions.device)
        taken = slice(*torch.searchsorted(self.positions, edges).tolist())
        return taken, self.positions[taken] - span.start


@dataclass(frozen=True)
class Share:
    """Some batch rows and key heads, and one span of time with the queries in it."""

    inputs: Inputs
    batch: slice
    heads: slice
    span: slice
    taken: slice
    positions: Tensor | None
    mask: SMatMask

    def keys(self, x: Tensor) -> Tensor:
        """Take this share of (B, T, Hkv, ...) as (N, T, ...)."""
        return x[self.batch, self.span, self.heads].transpose(1, 2).flatten(0, 1)

    def queries(self, x: Tensor) -> Tensor:
        """Take this share of (B, R, H, ...) as (N, G, R, ...)."""
        by_group = x.unflatten(2, (-1, self.inputs.group))
        share = by_group[self.batch, self.taken, self.heads]
        return share.permute(0, 2, 3, 1, *range(4, share.ndim)).flatten(0, 1)

    def put_keys(self, x: Tensor, to: Tensor) -> None:
        """Write (N, T, ...) into this share of (B, T, Hkv, ...)."""
        target = to[self.batch, self.span, self.heads].transpose(1, 2)
        target.copy_(x.unflatten(0, target.shape[:2]))

    def put_queries(self, x: Tensor, to: Tensor) -> None:
        """Write (N, G, R, ...) into this share of (B, R, H, ...)."""
        by_group = to.unflatten(2, (-1, self.inputs.group))
        target = by_group[self.batch, self.taken, self.heads]
        target = target.permute(0, 2, 3, 1, *range(4, target.ndim))
        target.copy_(x.unflatten(0, target.shape[:2]))

    def load(self) -> Rows:
        """Bring this share into the arrays that the branches work on."""
        inputs, dtype = self.inputs, self.inputs.dtype
        phi = pointwise_rows(inputs.feature_map, self.queries(inputs.q), dtype)
        key_features = pointwise_rows(inputs.feature_map, self.keys(inputs.k), dtype)
        psi = key_features
        if inputs.key_gate is not None:
            psi = psi * self.keys(inputs.key_gate).to(dtype).unsqueeze(-1)
        far = psi
        if inputs.write_weight is not None:
            far = psi * self.keys(inputs.write_weight).to(dtype).unsqueeze(-1)
        decay = None
        if inputs.log_decay is not None:
            decay = LogDecay(self.keys(inputs.log_decay))
        v, blocks = self._values(), self._blocks(len(psi))
        return Rows(
            phi, key_features, psi, far, v,
            CausalBranch(psi, v, decay, blocks, self.positions),
            LongRangeBranch(far, v, decay, self._routing()),
        )  # fmt: skip

    def _values(self) -> Tensor:
        """Values with a constant 1 appended, which gathers the normaliser (equation 1)."""
        values = self.keys(self.inputs.v)
        if not self.inputs.normalize:
            return values.to(self.inputs.dtype).contiguous()
        width = values.shape[-1]
        v_aug = values.new_empty(*values.shape[:-1], width + 1, dtype=self.inputs.dtype)
        v_aug[..., :width] = values
        v_aug[..., width] = 1
        return v_aug

    def _segments(self) -> tuple[Segment, ...]:
        """The mask's segments; at d = 1 every query sees all keys before it, whatever n(t) is.

        Only a write weight, or one branch alone, tells distant keys from recent ones there.
        """
        length = self.span.stop - self.span.start
        tells_apart = self.inputs.write_weight is not None or self.inputs.branch != "both"
        if self.mask.vc_dim == 1 and not tells_apart:
            return (Segment(0, self.mask.check_length(length), 0),)
        return self.mask.segments(length)

    def _routing(self) -> Routing:
        inputs = self.inputs
        return Routing(
            self.mask,
            self._segments(),
            None if inputs.profile is None else self.keys(inputs.profile),
            None if inputs.query_type is None else self.queries(inputs.query_type),
            self.positions,
        )

    def _blocks(self, num_rows: int) -> list[Block]:
        num_tiles = CPU_TILES if self.inputs.k.device.type == "cpu" else OTHER_TILES
        return cut_blocks(self._segments(), max(1, min(MAX_CHUNKS, num_tiles // num_rows)))


@dataclass(frozen=True)
class Rows:
    """A share's arrays, phi (N, G, R, r), keys (N, T, r), values (N, T, p), and its branches."""

    phi: Tensor
    key_features: Tensor
    psi: Tensor  # the keys of the causal branch, gated
    far: Tensor  # the keys that the long-range branch pools
    v: Tensor
    causal: CausalBranch
    long_range: LongRangeBranch
