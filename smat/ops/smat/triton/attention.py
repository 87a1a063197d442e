"""SMat-Attention on a GPU: the two branches as kernels, added and divided in one (Algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from smat.masks import Segment, SMatMask
from smat.ops.linear.decay import FORGETS
from smat.ops.linear.triton.causal import Causal, along_rows, divide_backward
from smat.ops.smat.attention import segments_of
from smat.ops.smat.routing import Inputs, Options
from smat.ops.smat.sequences import cut_sequences, take
from smat.ops.smat.triton.long_range import long_range, long_range_backward
from smat.ops.triton.decay import sum_gates


class Sequence:
    """One sequence of the op: views of its tensors, its own mask and sums of gates."""

    def __init__(self, inputs: Inputs, options: Options, mask: SMatMask) -> None:
        self.inputs, self.options, self.mask = inputs, options, mask
        self.segments = segments_of(inputs, options, mask, inputs.k.shape[1])
        log_decay = inputs.gates.log_decay
        self.cum = None if log_decay is None else sum_gates(log_decay)
        self.far_cum = self.cum if options.decay_scope == "all" else None
        self.has_local = options.branch != "long_range"
        self.has_distant = options.branch != "causal" and self.segments[-1].boundary > 0
        self.causal = Causal(
            *inputs[:3], inputs.gates.key_gate, self.cum, self.segments,
            options.feature_map, options.normalize,
        )  # fmt: skip

    def distant(self) -> tuple[Inputs, Options, SMatMask, tuple[Segment, ...], Tensor | None]:
        """The arguments of the long range."""
        return self.inputs, self.options, self.mask, self.segments, self.far_cum


def attend(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1: the output (B, T, H, V) and the normaliser (B, T, H), in fp32."""
    v, num_heads = inputs.v, max(inputs.q.shape[2], inputs.v.shape[2])
    out = v.new_empty(*v.shape[:2], num_heads, v.shape[-1], dtype=torch.float32)
    normalizer = out.new_empty(out.shape[:3])
    for tokens, some, mask in cut_sequences(inputs, options):
        sequence = Sequence(some, options, mask)
        far = long_range(*sequence.distant()) if sequence.has_distant else None
        sequence.causal.attend(far, sequence.has_local, out[:, tokens], normalizer[:, tokens])
    return out, normalizer


def attend_backward(
    inputs: Inputs, options: Options, grad_out: Tensor, out: Tensor, normalizer: Tensor
) -> dict[str, Tensor]:
    """Find the gradients of all tensors that were given, by name."""
    given = {
        "q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.gates._asdict(),
        "write_weight": inputs.routing.write_weight, "read_weight": inputs.routing.read_weight,
    }  # fmt: skip
    local = options.branch != "long_range"
    grads = {
        name: (torch.empty_like if local and "weight" not in name else torch.zeros_like)(
            x, dtype=torch.float32
        )
        for name, x in given.items()
        if x is not None
    }
    grad_out = along_rows(grad_out)
    inverse = delta = None
    if options.normalize:
        inverse, delta = divide_backward(grad_out, out, normalizer)
    for tokens, some, mask in cut_sequences(inputs, options):
        sequence = Sequence(some, options, mask)
        own = {name: grad[:, tokens] for name, grad in grads.items()}
        back = grad_out[:, tokens], take(inverse, tokens), take(delta, tokens), own
        if sequence.has_local:
            sequence.causal.backward(*back)
        if sequence.has_distant:
            long_range_backward(*sequence.distant(), *back)
    if inputs.gates.log_decay is not None:
        grads["log_decay"].masked_fill_(inputs.gates.log_decay <= FORGETS, 0.0)
    return {name: grad.to(given[name].dtype) for name, grad in grads.items()}
