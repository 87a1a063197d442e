"""SMat-Attention, forward and backward (Algorithm 1, and the adjoints of the appendix).

The two branches are added and divided once. They are worked off for some heads at a time: features
and answers of a slice are made, used and dropped, and the backward pass makes them again, so that
nothing as long as the sequence is kept but the arguments, the output and its normaliser.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.masks import Segment, SMatMask
from smat.ops.feature_maps import (
    divide_backward,
    inverse_or_zero,
    pointwise_backward_,
    pointwise_rows,
)
from smat.ops.linear.causal import CausalGrads, causal, causal_backward
from smat.ops.linear.chunks import cut_chunks, sum_heads
from smat.ops.linear.decay import FORGETS, LogDecay
from smat.ops.smat.long_range import LongRangeGrads, long_range, long_range_backward
from smat.ops.smat.routing import Inputs, Options, Routing

CPU_TOKENS, OTHER_TOKENS = 1 << 14, 1 << 22  # tokens x heads of values of a slice
EVERY = slice(None)


class HeadSlice(NamedTuple):
    """Some key heads of some batch rows of one sequence, N in all, with M heads of values each."""

    batch: slice
    heads: slice
    values: slice
    tokens: slice
    num_heads: int  # of keys, in all

    def of_keys(self, x: Tensor) -> Tensor:
        """View what keys have, or the G heads of queries of each: (b, h, G, t, ...)."""
        return self._view(x, EVERY)

    def of_values(self, x: Tensor) -> Tensor:
        """View what the heads of values have, or the answers: (b, h, M, t, ...)."""
        return self._view(x, self.values)

    def _view(self, x: Tensor, values: slice) -> Tensor:
        mine = x.unflatten(2, (self.num_heads, -1))[self.batch, self.tokens, self.heads, values]
        return mine.permute(0, 2, 3, 1, *range(4, mine.ndim))

    def write(self, onto: Tensor, x: Tensor, tokens: slice = EVERY) -> None:
        """Write what the heads of values have at some tokens."""
        view = self.of_values(onto)[:, :, :, tokens]
        view.copy_(x.reshape(view.shape))

    def add(self, onto: Tensor, x: Tensor, tokens: slice) -> None:
        """Write what keys and queries have, or add it to what other heads of values gave."""
        view = self.of_keys(onto)[:, :, :, tokens]
        if self.values.start:
            view += x.reshape(view.shape)
        else:
            view.copy_(x.reshape(view.shape))


def cut_slices(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Iterator[HeadSlice]:
    """Cut keys (B, T, Hk, K) and values (B, T, Hv, V) into slices of one sequence each."""
    num_batch, length, num_heads = k.shape[:3]
    num_values = v.shape[2] // num_heads
    edges = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    budget = CPU_TOKENS if k.device.type == "cpu" else OTHER_TOKENS
    for start, stop in itertools.pairwise(edges):
        if stop == start:
            continue
        fits = budget // (stop - start)
        cuts = (
            _cut(num_batch, fits // (num_values * num_heads)),
            _cut(num_heads, fits // num_values),
            _cut(num_values, fits) if num_values > 1 else [EVERY],
        )
        for batch, heads, values in itertools.product(*cuts):
            yield HeadSlice(batch, heads, values, slice(start, stop), num_heads)


def _cut(total: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]


class Loaded:
    """One slice as the branches take it: features, augmented values, gates, and who sees whom."""

    def __init__(self, part: HeadSlice, inputs: Inputs, options: Options) -> None:
        self.part, self.options, self.mask, self.given = part, options, options.mask, inputs.routing
        if inputs.cu_seqlens is not None:  # every packed sequence has the mask of its own length
            self.mask = options.mask.for_length(part.tokens.stop - part.tokens.start)
        self.dtype = torch.promote_types(inputs.v.dtype, torch.float32)
        log_decay, key_gate = inputs.gates
        self.phi = self._features(part.of_keys(inputs.q)).flatten(0, 1)  # (N, G, T, r)
        self.psi = self.features = self._features(part.of_keys(inputs.k)).flatten(0, 2)  # (N, T, r)
        self.key_gate = None
        if key_gate is not None:
            self.key_gate = part.of_keys(key_gate).flatten(0, 2).to(self.dtype).unsqueeze(-1)
            self.psi = self.features * self.key_gate
        self.v = self._augmented(part.of_values(inputs.v).flatten(0, 1))  # (N, M, T, p)
        self.log_decay = self._rows(log_decay, None)  # (N, M, T)
        self.decay = None if self.log_decay is None else LogDecay.of(self.log_decay)
        self.write_weight = self._rows(self.given.write_weight, self.dtype)
        self.segments = segments_of(inputs, options, self.mask, self.v.shape[2])
        self.has_local = options.branch != "long_range"
        self.has_distant = options.branch != "causal" and self.segments[-1].boundary > 0

    def _rows(self, x: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
        """Take something of the heads of values, or of the answers: (N, M, T, ...)."""
        return None if x is None else self.part.of_values(x).flatten(0, 1).to(dtype)

    def _features(self, x: Tensor) -> Tensor:
        return pointwise_rows(self.options.feature_map, x, self.dtype)

    def _augmented(self, v: Tensor) -> Tensor:
        """Append a constant 1 to values, which gathers the normaliser (equation 1)."""
        if not self.options.normalize:
            return v.to(self.dtype).contiguous()
        v_aug = v.new_empty(*v.shape[:-1], v.shape[-1] + 1, dtype=self.dtype)
        v_aug[..., :-1] = v
        v_aug[..., -1] = 1
        return v_aug

    def distant_arguments(self) -> tuple[Tensor, Tensor, Tensor, LogDecay | None, Routing]:
        """Give every head of values a row of its own, as the long range takes them."""
        num_values, group = self.v.shape[1], self.phi.shape[1]
        phi = self.phi.unsqueeze(1).expand(-1, num_values, -1, -1, -1).flatten(0, 1)
        psi = self.psi.unsqueeze(1).expand(-1, num_values, -1, -1).flatten(0, 1)
        if self.write_weight is not None:
            psi = psi * self.write_weight.flatten(0, 1).unsqueeze(-1)
        decay = self.decay if self.options.decay_scope == "all" else None
        decay = decay and LogDecay(*(x.flatten(0, 1) for x in decay))
        profile = self._rows(self.given.profile, torch.long)
        types, weight = (
            None if x is None else x.reshape(-1, group, *x.shape[2:])
            for x in (
                self._rows(self.given.query_type, torch.long),
                self._rows(self.given.read_weight, self.dtype),
            )
        )
        routing = Routing(None if profile is None else profile.flatten(0, 1), types, None, weight)
        return phi, psi, self.v.flatten(0, 1), decay, routing


def segments_of(
    inputs: Inputs, options: Options, mask: SMatMask, length: int
) -> tuple[Segment, ...]:
    """The mask's segments; at d = 1 every query sees all keys before it, whatever n(t) is.

    Only weights, several reads, gates of one kind or one branch alone tell distant keys from
    recent ones there.
    """
    types, routing = inputs.routing.query_type, inputs.routing
    weighs = routing.write_weight is not None or (types is not None and types.ndim == 4)
    forgets = inputs.gates.log_decay is not None and options.decay_scope != "all"
    if mask.vc_dim == 1 and not weighs and not forgets and options.branch == "both":
        return (Segment(0, mask.check_length(length), 0),)
    return mask.segments(length)


def attend(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1: the output (B, T, H, V) and the normaliser (B, T, H).

    Both come in the dtype of the sums: the backward pass subtracts the output from the values, and
    where gates are strong an output rounded to half precision would drown what is left.
    """
    v, num_heads = inputs.v, max(inputs.q.shape[2], inputs.v.shape[2])
    out = v.new_empty(*v.shape[:2], num_heads, v.shape[-1], dtype=_wide(v))
    normalizer = v.new_empty(out.shape[:3], dtype=_wide(v))
    for part in cut_slices(inputs.k, inputs.v, inputs.cu_seqlens):
        y = _add_branches(Loaded(part, inputs, options))
        into, total = part.of_values(out), part.of_values(normalizer)
        y = y.view(*into.shape[:4], -1)
        if options.normalize:
            total.copy_(y[..., -1])
            torch.mul(y[..., :-1], inverse_or_zero(total).unsqueeze(-1), out=into)
        else:
            into.copy_(y)
        del y  # the next slice can have its memory
    return out, normalizer


def _add_branches(loaded: Loaded) -> Tensor:
    """y (N, G M, T, p): the numerator, and with it the normaliser."""
    phi, psi, v, segments = loaded.phi, loaded.psi, loaded.v, loaded.segments
    # Lines 5-7: chunk sums, exclusive scan within each window, dense tiles.
    if loaded.has_local:
        y = causal(phi, psi, v, loaded.decay, segments)
    else:
        y = v.new_zeros(len(v), phi.shape[1] * v.shape[1], *v.shape[2:])
    # Lines 2-4: pool by profile, tabulate, read by type.
    if loaded.has_distant:
        first, y_long = long_range(*loaded.distant_arguments(), loaded.mask, segments)
        y[:, :, first:] += y_long.view_as(y[:, :, first:])
    return y


def attend_backward(
    inputs: Inputs,
    options: Options,
    grad_out: Tensor,
    out: Tensor,
    normalizer: Tensor,
) -> dict[str, Tensor]:
    """Find the gradients of all tensors that were given, by name, fp32 or wider."""
    given = {
        "q": inputs.q, "k": inputs.k, "v": inputs.v, "log_decay": inputs.gates.log_decay,
        "key_gate": inputs.gates.key_gate, "write_weight": inputs.routing.write_weight,
        "read_weight": inputs.routing.read_weight,
    }  # fmt: skip
    grads = {
        name: torch.empty_like(x, dtype=_wide(x)) for name, x in given.items() if x is not None
    }
    for part in cut_slices(inputs.k, inputs.v, inputs.cu_seqlens):
        grad, answer, total = (
            part.of_values(x).flatten(0, 1) for x in (grad_out, out, normalizer)
        )  # (N, G M, T, V), and without V
        grad_y = divide_backward(grad, answer, total) if options.normalize else grad.contiguous()
        _slice_backward(Loaded(part, inputs, options), grad_y, grads)
        del grad_y  # the next slice can have its memory
    return grads


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _slice_backward(loaded: Loaded, grad_y: Tensor, grads: dict[str, Tensor]) -> None:
    """Write the gradients of one slice, of both branches, taken through gates and features."""
    part, name, phi = loaded.part, loaded.options.feature_map, loaded.phi
    distant = _distant_backward(loaded, grad_y, grads)
    for tokens, grad_phi, grad_psi, grad_v, grad_gates in _local_backward(loaded, grad_y):
        if distant is not None:
            first, n = phi.shape[2] - distant.phi.shape[2], distant.psi.shape[1]
            if tokens.start >= first:
                grad_phi += distant.phi[:, :, tokens.start - first : tokens.stop - first]
            if tokens.stop <= n:
                grad_psi += distant.psi[:, tokens]
                grad_v += distant.v[:, :, tokens]
            if grad_gates is not None and distant.log_decay is not None:
                grad_gates = grad_gates + distant.log_decay[:, :, tokens]
        if grad_gates is not None and loaded.log_decay is not None:
            forgets = loaded.log_decay[:, :, tokens] <= FORGETS
            part.write(grads["log_decay"], grad_gates.masked_fill(forgets, 0.0), tokens)
        features = loaded.features[:, tokens]
        if loaded.key_gate is not None:
            part.add(grads["key_gate"], (features * grad_psi).sum(-1), tokens)
            grad_psi = grad_psi * loaded.key_gate[:, tokens]
        part.add(grads["q"], pointwise_backward_(name, phi[:, :, tokens], grad_phi), tokens)
        part.add(grads["k"], pointwise_backward_(name, features, grad_psi), tokens)
        part.write(grads["v"], grad_v[..., : grads["v"].shape[-1]], tokens)


def _local_backward(loaded: Loaded, grad_y: Tensor) -> Iterator[CausalGrads]:
    """Yield the gradients of the causal branch; zeros if it takes no part."""
    phi, psi, v, segments = loaded.phi, loaded.psi, loaded.v, loaded.segments
    if loaded.has_local:
        yield from causal_backward(phi, psi, v, loaded.decay, segments, grad_y)
        return
    for start, stop, *_ in cut_chunks(segments):
        some = phi[:, :, start:stop], psi[:, start:stop], v[:, :, start:stop]
        zeros = (torch.zeros_like(x) for x in some)
        gates = None if loaded.decay is None else torch.zeros_like(v[:, :, start:stop, 0])
        yield CausalGrads(slice(start, stop), *zeros, gates)  # type: ignore[call-arg]


def _distant_backward(
    loaded: Loaded, grad_y: Tensor, grads: dict[str, Tensor]
) -> LongRangeGrads | None:
    """Write the gradients of weights; the others are summed over heads of values, but for v."""
    part, heads = loaded.part, loaded.v.shape[:2]
    if not loaded.has_distant:
        for name in grads.keys() & {"write_weight", "read_weight"}:
            part.of_values(grads[name]).zero_()
        return None
    by_row = grad_y.view(-1, loaded.phi.shape[1], *grad_y.shape[2:])
    found = long_range_backward(*loaded.distant_arguments(), loaded.mask, loaded.segments, by_row)
    phi, psi, v = (x.unflatten(0, heads) for x in found[:3])
    if loaded.write_weight is not None:
        n = psi.shape[2]
        pulled = (loaded.psi[:, None, :n] * psi).sum(-1)
        part.write(grads["write_weight"], F.pad(pulled, (0, loaded.v.shape[2] - n)))
        psi = psi * loaded.write_weight[:, :, :n].unsqueeze(-1)
    if found.read_weight is not None:
        part.write(grads["read_weight"], found.read_weight)
    gates = None if found.log_decay is None else found.log_decay.unflatten(0, heads)
    return LongRangeGrads(sum_heads(phi)[:, 0], sum_heads(psi)[:, 0], v, gates, None)
