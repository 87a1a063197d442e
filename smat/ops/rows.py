"""One share of the work: a few rows of keys with their queries, taken from the op's arguments.

A row is one key/value head of one sequence. Features, augmented values and the gradient of the
division are made for a range of tokens when a branch asks for it, in the layout and dtype that its
products want: nothing as long as the sequence is kept but what the arguments already are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from smat.masks import Segment, SMatMask
from smat.ops.causal import CausalBranch
from smat.ops.decay import LogDecay
from smat.ops.feature_maps import pointwise_rows
from smat.ops.long_range import LongRangeBranch
from smat.ops.pieces import cut_blocks
from smat.ops.routing import Routing

CPU_TOKENS, OTHER_TOKENS = 1 << 16, 1 << 22  # rows x tokens of a share
CPU_TILES, OTHER_TILES = 128, 1 << 12  # tiles of a block
MAX_CHUNKS = 64  # of a row in a block: the scan within it costs their root for each
ALL = slice(None)


@dataclass(frozen=True)
class Inputs:
    """The arguments of the op, whole: k and v (B, T, Hkv, .), gates and profile (B, T, Hkv).

    q (B, R, H, K) and query_type (B, R, H), or (B, R, H, k) with read_weight, are there for every
    token, or for those at the sorted positions (R,).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    key_gate: Tensor | None
    write_weight: Tensor | None
    read_weight: Tensor | None
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

    def shares(
        self, tables: Tensor, answer: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> Iterator[Share]:
        """Cut the work into shares: whole sequences of a few heads or batch rows each.

        Each has its part of `tables`, the type tables that are kept for the backward pass, if any.
        """
        of_row = tables.view(self.k.shape[0] * self.k.shape[2], -1) if len(tables) else None
        done = 0
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
                    share = Share(self, *rows, span, taken, positions, mask, answer)
                    if of_row is not None:
                        kept = of_row[done : done + share.num_rows].view(-1)
                        share = replace(share, kept=kept)
                    done += share.num_rows
                    yield share

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
    answer: tuple[Tensor, Tensor, Tensor] | None = None  # gradient of out, out, normaliser
    kept: Tensor | None = None  # memory for the type table

    @property
    def num_rows(self) -> int:
        """N: batch rows times key heads."""
        return len(range(self.inputs.k.shape[0])[self.batch]) * len(
            range(self.inputs.k.shape[2])[self.heads]
        )

    def of_keys(self, x: Tensor, span: slice = ALL) -> Tensor:
        """Take some tokens of this share of (B, T, Hkv, ...), as (N, t, ...)."""
        return x[self.batch, self.span, self.heads][:, span].transpose(1, 2).flatten(0, 1)

    def of_queries(self, x: Tensor, taken: slice = ALL) -> Tensor:
        """Take some queries of this share of (B, R, H, ...), as (N, G, R, ...)."""
        by_group = x.unflatten(2, (-1, self.inputs.group))
        share = by_group[self.batch, self.taken, self.heads][:, taken]
        return share.permute(0, 2, 3, 1, *range(4, share.ndim)).flatten(0, 1)

    def put_keys(self, x: Tensor, to: Tensor, span: slice = ALL) -> None:
        """Write (N, t, ...) into this share of (B, T, Hkv, ...)."""
        target = to[self.batch, self.span, self.heads][:, span].transpose(1, 2)
        target.copy_(x.unflatten(0, target.shape[:2]))

    def put_queries(self, x: Tensor, to: Tensor, taken: slice = ALL) -> None:
        """Write (N, G, R, ...) into this share of (B, R, H, ...)."""
        by_group = to.unflatten(2, (-1, self.inputs.group))
        target = by_group[self.batch, self.taken, self.heads][:, taken]
        target = target.permute(0, 2, 3, 1, *range(4, target.ndim))
        target.copy_(x.unflatten(0, target.shape[:2]))

    def phi(self, taken: slice) -> Tensor:
        """Return the features of some queries, (N, G, R, r)."""
        inputs = self.inputs
        return pointwise_rows(inputs.feature_map, self.of_queries(inputs.q, taken), inputs.dtype)

    def key_features(self, span: slice) -> Tensor:
        """Return the features of some keys before the key gate, (N, t, r)."""
        inputs = self.inputs
        return pointwise_rows(inputs.feature_map, self.of_keys(inputs.k, span), inputs.dtype)

    def psi(self, span: slice) -> Tensor:
        """Return the features of some keys, (N, t, r)."""
        return self.gated(self.key_features(span), self.inputs.key_gate, span)

    def far(self, span: slice) -> Tensor:
        """Return the features with which some keys are pooled, (N, t, r)."""
        return self.gated(self.psi(span), self.inputs.write_weight, span)

    def gated(self, features: Tensor, gate: Tensor | None, span: slice) -> Tensor:
        """Scale the features of some keys (N, t, r) by a gate (B, T, Hkv), if there is one."""
        if gate is None:
            return features
        return features * self.of_keys(gate, span).to(features.dtype).unsqueeze(-1)

    def v(self, span: slice) -> Tensor:
        """Return values with a constant 1 appended, which gathers the normaliser (equation 1)."""
        values, dtype = self.of_keys(self.inputs.v, span), self.inputs.dtype
        if not self.inputs.normalize:
            return values.to(dtype).contiguous()
        width = values.shape[-1]
        v_aug = values.new_empty(*values.shape[:-1], width + 1, dtype=dtype)
        v_aug[..., :width] = values
        v_aug[..., width] = 1
        return v_aug

    def grad_y(self, taken: slice) -> Tensor:
        """Take the outputs' gradient through the division: (g / s, -(g . o) / s) for o = y / s."""
        assert self.answer is not None
        grad_out, out, normalizer = self.answer
        grad = self.of_queries(grad_out, taken).to(self.inputs.dtype)
        if not self.inputs.normalize:
            return grad.contiguous()
        inverse = inverse_or_zero(self.of_queries(normalizer, taken)).unsqueeze(-1)
        dot = (grad * self.of_queries(out, taken)).sum(-1, keepdim=True)
        return torch.cat([grad, -dot], dim=-1).mul_(inverse)

    def zero_state(self) -> Tensor:
        """Return the state of nothing, (N, r, p)."""
        inputs = self.inputs
        width = inputs.v.shape[-1] + int(inputs.normalize)
        shape = (self.num_rows, inputs.k.shape[-1], width)
        return torch.zeros(shape, dtype=inputs.dtype, device=inputs.k.device)

    @cached_property
    def decay(self) -> LogDecay | None:
        """The running sums of the share's gates."""
        log_decay = self.inputs.log_decay
        return None if log_decay is None else LogDecay(self.of_keys(log_decay))

    @property
    def causal(self) -> CausalBranch:
        """The causal branch of the share."""
        num_chunks = chunks_per_block(self.num_rows, self.inputs.k.device)
        blocks = cut_blocks(self._segments(), num_chunks)
        return CausalBranch(self, self.decay, blocks, self.positions)

    @property
    def long_range(self) -> LongRangeBranch:
        """The long-range branch of the share."""
        return LongRangeBranch(self, self.decay, self._routing(), self.kept)

    def _segments(self) -> tuple[Segment, ...]:
        """The mask's segments; at d = 1 every query sees all keys before it, whatever n(t) is.

        Only weights, several reads or one branch alone tell distant keys from recent ones there.
        """
        length = self.span.stop - self.span.start
        inputs = self.inputs
        reads = inputs.query_type is not None and inputs.query_type.ndim == 4
        tells_apart = inputs.write_weight is not None or reads or inputs.branch != "both"
        if self.mask.vc_dim == 1 and not tells_apart:
            return (Segment(0, self.mask.check_length(length), 0),)
        return self.mask.segments(length)

    def _routing(self) -> Routing:
        inputs, weight = self.inputs, self.inputs.read_weight
        return Routing(
            self.mask,
            self._segments(),
            None if inputs.profile is None else self.of_keys(inputs.profile),
            None if inputs.query_type is None else self.of_queries(inputs.query_type),
            None if weight is None else self.of_queries(weight).to(inputs.dtype),
            self.positions,
        )


def chunks_per_block(num_rows: int, device: torch.device) -> int:
    """Choose how many chunks of each row to work off at once."""
    tiles = CPU_TILES if device.type == "cpu" else OTHER_TILES
    return max(1, min(MAX_CHUNKS, tiles // num_rows))


def inverse_or_zero(normalizer: Tensor) -> Tensor:
    """Invert normalisers; a row that saw nothing has normaliser 0 and output 0.

    So has a row whose weights all fell below the smallest normal number, where 1 / s overflows.
    """
    sees_nothing = normalizer.abs() < torch.finfo(normalizer.dtype).tiny
    return torch.where(sees_nothing, 0.0, normalizer.reciprocal())
