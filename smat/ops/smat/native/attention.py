"""SMat-Attention on a CPU: the long range, then the causal kernel on top of it (Algorithm 1)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from smat.masks import Segment
from smat.ops.feature_maps import inverse_or_zero
from smat.ops.linear.decay import FORGETS
from smat.ops.linear.native.causal import Causal, is_available
from smat.ops.native.build import load
from smat.ops.smat import attention as in_torch
from smat.ops.smat.native.long_range import SOURCE, long_range, long_range_backward
from smat.ops.smat.routing import Inputs, Options
from smat.ops.smat.sequences import cut_sequences


def attend(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1: the output (B, T, H, V) and the normaliser (B, T, H), fp32 or wider.

    What queries see of distant keys is written into both; the causal kernel adds and divides.
    """
    if not is_available() or load(SOURCE) is None:
        return in_torch.attend(inputs, options)
    v, num_heads = inputs.v, max(inputs.q.shape[2], inputs.v.shape[2])
    wide = torch.promote_types(v.dtype, torch.float32)
    make = v.new_zeros if options.branch == "long_range" else v.new_empty
    out = make((*v.shape[:2], num_heads, v.shape[-1]), dtype=wide)
    normalizer = make(out.shape[:3], dtype=wide)
    sequences = _cut(inputs, options)
    for sequence in sequences:
        if sequence.has_distant:
            at = sequence.tokens
            long_range(
                sequence.inputs, sequence.options, sequence.segments, out[:, at], normalizer[:, at]
            )
    if options.branch != "long_range":
        if sequences and out.numel():
            _causal(inputs, options, sequences).attend(out, normalizer, options.branch == "both")
    elif options.normalize:
        out *= inverse_or_zero(normalizer).unsqueeze(-1)
    return out, normalizer


def attend_backward(
    inputs: Inputs, options: Options, grad_out: Tensor, out: Tensor, normalizer: Tensor
) -> dict[str, Tensor]:
    """Find the gradients of all tensors that were given, by name, fp32 or wider.

    The causal kernel writes them, the long range adds its own.
    """
    if not is_available(backward=True) or load(SOURCE) is None:
        return in_torch.attend_backward(inputs, options, grad_out, out, normalizer)
    given = {
        "q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.gates._asdict(),
        "write_weight": inputs.routing.write_weight, "read_weight": inputs.routing.read_weight,
    }  # fmt: skip
    sequences, has_local = _cut(inputs, options), options.branch != "long_range"
    grads = {}
    for name, x in given.items():
        if x is not None:
            make = torch.empty_like if has_local and "weight" not in name else torch.zeros_like
            wide = torch.promote_types(x.dtype, torch.float32)
            grads[name] = make(x, dtype=wide, memory_format=torch.contiguous_format)
    if has_local and sequences and out.numel():
        causal = _causal(inputs, options, sequences)
        causal.backward(grad_out, out, normalizer, grads)
    for sequence in sequences:
        if sequence.has_distant:
            at = sequence.tokens
            own = {name: grad[:, at] for name, grad in grads.items()}
            long_range_backward(
                sequence.inputs, sequence.options, sequence.segments,
                grad_out[:, at], out[:, at], normalizer[:, at], own,
            )  # fmt: skip
    if inputs.gates.log_decay is not None:
        grads["log_decay"].masked_fill_(inputs.gates.log_decay <= FORGETS, 0.0)
    return grads


class Sequence(NamedTuple):
    """One sequence of the call: its place, its tensors, its own mask, who sees whom."""

    tokens: slice
    inputs: Inputs
    options: Options
    segments: tuple[Segment, ...]

    @property
    def has_distant(self) -> bool:
        """Whether the long range takes part."""
        return self.options.branch != "causal" and self.segments[-1].boundary > 0


def _cut(inputs: Inputs, options: Options) -> list[Sequence]:
    sequences = []
    for tokens, some, mask in cut_sequences(inputs, options):
        own = options._replace(mask=mask)
        segments = in_torch.segments_of(some, own, mask, some.k.shape[1])
        sequences.append(Sequence(tokens, some, own, segments))
    return sequences


def _causal(inputs: Inputs, options: Options, sequences: list[Sequence]) -> Causal:
    pieces = [(sequence.tokens.start, sequence.segments) for sequence in sequences]
    return Causal(*inputs[:3], *inputs.gates, pieces, options.feature_map, options.normalize)
