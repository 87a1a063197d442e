"""One share of the work: a few rows of keys with their queries, taken from the op's arguments.

A row is one key head of one sequence, with G heads of queries or M heads of values. Features,
augmented values and the gradient of the division are made for a range of tokens when a branch asks
for it, in the layout and dtype that its products want: nothing as long as the sequence is kept but
what the arguments already are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from smat.masks import Segment, SMatMask
from smat.ops.boundary_decay import BoundaryDecay
from smat.ops.causal import CausalBranch
from smat.ops.decay import LogDecay
from smat.ops.feature_maps import pointwise_rows
from smat.ops.long_range import LongRangeBranch
from smat.ops.part import Part
from smat.ops.pieces import cut_blocks
from smat.ops.routing import Routing

CPU_TOKENS, OTHER_TOKENS = 1 << 16, 1 << 22  # rows x tokens of a share
CPU_TILES, OTHER_TILES = 128, 1 << 12  # tiles of a block
MAX_CHUNKS = 64  # of a row in a block: the scan within it costs their root for each


@dataclass(frozen=True)
class Inputs:
    """The arguments of the op, whole: k (B, T, Hk, K), v (B, T, Hv, V), gates, profile (B, T, Hv).

    q (B, R, Hq, K) and query_type (B, R, H), or (B, R, H, k) with read_weight, are there for every
    token, or for those at the sorted positions (R,). Answers have H heads, the larger of Hq and Hv;
    the smaller is Hk.
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
        """G: the number of query heads that share a key head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def num_values(self) -> int:
        """M: the number of value heads that share a key head."""
        return self.v.shape[2] // self.k.shape[2]

    @property
    def answer_shape(self) -> tuple[int, int, int]:
        """The batch, the queries and the heads of the output."""
        return (*self.q.shape[:2], max(self.q.shape[2], self.v.shape[2]))

    def shares(
        self, tables: Tensor, answer: tuple[Tensor, Tensor, Tensor] | None = None
    ) -> Iterator[Share]:
        """Cut the work into shares: whole sequences of a few heads or batch rows each.

        Each has its part of `tables`, the type tables that are kept for the backward pass, if any.
        """
        of_row = tables.view(self.v.shape[0] * self.v.shape[2], -1) if len(tables) else None
        done = 0
        num_batch, num_heads, num_values = self.k.shape[0], self.k.shape[2], self.num_values
        budget = CPU_TOKENS if self.k.device.type == "cpu" else OTHER_TOKENS
        for span, mask in self._sequences():
            rows = budget // (span.stop - span.start)
            values = max(1, min(num_values, rows))
            heads = max(1, min(num_heads, rows // num_values))
            batch = max(1, min(num_batch, rows // (num_values * num_heads)))
            taken, positions = self._queries_in(span)
            cuts = _cut(num_batch, batch), _cut(num_heads, heads), _cut(num_values, values)
            for part in itertools.product(*cuts):
                share = Share(
                    self.group, num_values, *part, span, taken, self, positions, mask, answer
                )
                num_states = share.num_values * share.num_rows
                if of_row is not None:
                    share = replace(share, kept=of_row[done : done + num_states].view(-1))
                done += num_states
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
class Share(Part):
    """One part of the arguments, and what the branches want to know of it."""

    inputs: Inputs
    positions: Tensor | None
    mask: SMatMask
    answer: tuple[Tensor, Tensor, Tensor] | None = None  # gradient of out, out, normaliser
    kept: Tensor | None = None  # memory for the type table

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

    def gated(self, features: Tensor, gate: Tensor | None, span: slice) -> Tensor:
        """Scale the features of some keys (N, t, r) by a gate (B, T, Hk), if there is one."""
        if gate is None:
            return features
        return features * self.of_keys(gate, span).to(features.dtype).unsqueeze(-1)

    def v(self, span: slice) -> Tensor:
        """Return values with a constant 1 appended, which gathers the normaliser (equation 1)."""
        values, dtype = self.of_values(self.inputs.v, span), self.inputs.dtype
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
        grad = self.of_answers(grad_out, taken).to(self.inputs.dtype)
        if not self.inputs.normalize:
            return grad.contiguous()
        inverse = inverse_or_zero(self.of_answers(normalizer, taken)).unsqueeze(-1)
        dot = (grad * self.of_answers(out, taken)).sum(-1, keepdim=True)
        return torch.cat([grad, -dot], dim=-1).mul_(inverse)

    def zero_state(self) -> Tensor:
        """Return the state of nothing, (M N, r, p)."""
        inputs = self.inputs
        width = inputs.v.shape[-1] + int(inputs.normalize)
        shape = (self.num_values * self.num_rows, inputs.k.shape[-1], width)
        return torch.zeros(shape, dtype=inputs.dtype, device=inputs.k.device)

    @cached_property
    def decay(self) -> LogDecay | None:
        """The running sums of the share's gates, (M N, T)."""
        log_decay = self.inputs.log_decay
        return None if log_decay is None else LogDecay(self.of_values(log_decay).flatten(0, 1))

    def causal(self, long_range: LongRangeBranch) -> CausalBranch:
        """The causal branch of the share, which runs after the long range."""
        num_chunks = chunks_per_block(self.num_values * self.num_rows, self.inputs.k.device)
        blocks = cut_blocks(self._segments(), num_chunks)
        return CausalBranch(Beside(self, long_range), self.decay, blocks, self.positions)

    @property
    def long_range(self) -> LongRangeBranch:
        """The long-range branch of the share."""
        gates = None if self.decay is None else BoundaryDecay(self.decay, self.inputs.dtype)
        return LongRangeBranch(EachHead(self), gates, self._routing(), self.kept)

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
        inputs = self.inputs
        types, weight = inputs.query_type, inputs.read_weight
        return Routing(
            self.mask,
            self._segments(),
            None if inputs.profile is None else self.of_values(inputs.profile).flatten(0, 1),
            None if types is None else self.of_answers(types).flatten(0, 1),
            None if weight is None else self.of_answers(weight).flatten(0, 1).to(inputs.dtype),
            self.positions,
        )


@dataclass(frozen=True)
class EachHead:
    """A share as the long-range branch sees it: M N rows, for every head of values its own."""

    share: Share

    def phi(self, taken: slice) -> Tensor:
        """Return the features of some queries, (M N, G, R, r)."""
        return self._repeated(self.share.phi(taken))

    def far(self, span: slice) -> Tensor:
        """Return the features with which some keys are pooled, (M N, t, r)."""
        share, features = self.share, self._repeated(self.share.psi(span))
        weight = share.inputs.write_weight
        if weight is None:
            return features
        return features * share.of_values(weight, span).flatten(0, 1).to(features.dtype)[..., None]

    def v(self, span: slice) -> Tensor:
        """Return the values of some keys, (M N, t, p)."""
        return self.share.v(span).flatten(0, 1)

    def grad_y(self, taken: slice) -> Tensor:
        """Return the gradient of some outputs, (M N, G, R, p)."""
        return self.share.grad_y(taken).flatten(0, 1)

    def _repeated(self, x: Tensor) -> Tensor:
        """(N, ...) -> (M N, ...)."""
        return x.expand(self.share.num_values, *x.shape).flatten(0, 1)


@dataclass(frozen=True)
class Beside:
    """A share as the causal branch sees it: what the long range has made is not made again."""

    share: Share
    long_range: LongRangeBranch

    def phi(self, taken: slice, boundary: int) -> Tensor:
        """Return the features of some queries with one boundary, (N, G, R, r)."""
        made = self.long_range.made_of_queries("phi", boundary, taken)
        return self.share.phi(taken) if made is None else self._by_value(made)[0]

    def psi(self, span: slice) -> Tensor:
        """Return the features of some keys, (N, t, r)."""
        made = None
        if self.share.inputs.write_weight is None:
            made = self.long_range.made_of_keys("psi", span)
        return self.share.psi(span) if made is None else self._by_value(made)[0]

    def v(self, span: slice) -> Tensor:
        """Return the values of some keys, (M, N, t, p)."""
        made = self.long_range.made_of_keys("v", span)
        return self.share.v(span) if made is None else self._by_value(made)

    def grad_y(self, taken: slice, boundary: int) -> Tensor:
        """Return the gradient of some outputs, (M, N, G, R, p)."""
        made = self.long_range.made_of_queries("grad_y", boundary, taken)
        return self.share.grad_y(taken) if made is None else self._by_value(made)

    def zero_state(self) -> Tensor:
        """Return the state of nothing, (M N, r, p)."""
        return self.share.zero_state()

    def _by_value(self, x: Tensor) -> Tensor:
        """(M N, ...) -> (M, N, ...)."""
        return x.unflatten(0, (self.share.num_values, self.share.num_rows))


def _cut(total: int, size: int) -> list[slice]:
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]


def chunks_per_block(num_states: int, device: torch.device) -> int:
    """Choose how many chunks to work off at once, of so many states."""
    tiles = CPU_TILES if device.type == "cpu" else OTHER_TILES
    return max(1, min(MAX_CHUNKS, tiles // num_states))


def inverse_or_zero(normalizer: Tensor) -> Tensor:
    """Invert normalisers; a row that saw nothing has normaliser 0 and output 0.

    So has a row whose weights all fell below the smallest normal number, where 1 / s overflows.
    """
    sees_nothing = normalizer.abs() < torch.finfo(normalizer.dtype).tiny
    return torch.where(sees_nothing, 0.0, normalizer.reciprocal())
