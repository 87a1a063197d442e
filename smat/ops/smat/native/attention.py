"""SMat-Attention on a CPU: the long range, then the causal kernel on top of it (Algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from smat.ops.feature_maps import inverse_or_zero
from smat.ops.linear.native.causal import Causal, is_available
from smat.ops.smat import attention as in_torch
from smat.ops.smat.native.long_range import long_range
from smat.ops.smat.routing import Inputs, Options
from smat.ops.smat.sequences import cut_sequences


def attend(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1: the output (B, T, H, V) and the normaliser (B, T, H), fp32 or wider.

    What queries see of distant keys is written into both; the causal kernel adds and divides.
    """
    if not is_available():
        return in_torch.attend(inputs, options)
    v, num_heads = inputs.v, max(inputs.q.shape[2], inputs.v.shape[2])
    wide = torch.promote_types(v.dtype, torch.float32)
    make = v.new_zeros if options.branch == "long_range" else v.new_empty
    out = make(*v.shape[:2], num_heads, v.shape[-1], dtype=wide)
    normalizer = make(out.shape[:3], dtype=wide)
    pieces = []
    for tokens, some, mask in cut_sequences(inputs, options):
        own = options._replace(mask=mask)
        segments = in_torch.segments_of(some, own, mask, some.k.shape[1])
        pieces.append((tokens.start, segments))
        if options.branch != "causal" and segments[-1].boundary > 0:
            long_range(some, own, segments, out[:, tokens], normalizer[:, tokens])
    if options.branch == "long_range":
        if options.normalize:
            out *= inverse_or_zero(normalizer).unsqueeze(-1)
    elif pieces and out.numel():
        causal = Causal(*inputs[:3], *inputs.gates, pieces, options.feature_map, options.normalize)
        causal.attend(out, normalizer, options.branch == "both")
    return out, normalizer


def attend_backward(
    inputs: Inputs, options: Options, grad_out: Tensor, out: Tensor, normalizer: Tensor
) -> dict[str, Tensor]:
    """Find the gradients of all tensors that were given, by name, fp32 or wider."""
    return in_torch.attend_backward(inputs, options, grad_out, out, normalizer)
