"""SMat-Attention, forward and backward (Algorithm 1, and the adjoints of the appendix)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smat.ops.causal import BlockGrads
from smat.ops.decay import grad_log_decay
from smat.ops.feature_maps import pointwise_backward_
from smat.ops.long_range import LongRangeGrads
from smat.ops.pieces import Block
from smat.ops.rows import Inputs, Share, inverse_or_zero

DIFFERENTIABLE = ("q", "k", "v", "log_decay", "key_gate", "write_weight", "read_weight")


def smat_forward(inputs: Inputs, num_kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Run Algorithm 1: the output (B, R, H, V), the normaliser (B, R, H), and kept type tables.

    All come in the dtype of the sums: the backward pass subtracts the output from the values, and
    where gates are strong an output rounded to half precision would drown what is left.
    """
    q, v = inputs.q, inputs.v
    out = v.new_empty(*q.shape[:3], v.shape[-1], dtype=inputs.dtype)
    normalizer = v.new_empty(*q.shape[:3], dtype=inputs.dtype)
    tables = v.new_empty(num_kept, dtype=inputs.dtype)
    for share in inputs.shares(tables):
        # Lines 2-4: pool by profile, tabulate, read by type.
        distant = share.long_range.forward() if inputs.branch != "causal" else None
        # Lines 5-7: chunk sums, exclusive scan within each window, dense tiles; add, divide once.
        for block, taken, y in _recent(share):
            seen = None if distant is None else distant.of(block.boundary, taken)
            y = y if seen is None else y + seen
            if inputs.normalize:
                y, total = y[..., :-1], y[..., -1]
                share.put_queries(total, normalizer, taken)
                y = y * inverse_or_zero(total).unsqueeze(-1)
            share.put_queries(y, out, taken)
    return out, normalizer, tables


def _recent(share: Share) -> Iterator[tuple[Block, slice, Tensor]]:
    """Yield what the causal branch answers; nothing but zeros if it is not asked."""
    causal = share.causal
    if share.inputs.branch != "long_range":
        yield from causal.forward()
        return
    zero = share.zero_state()
    for block, taken in zip(causal.blocks, causal.taken(), strict=True):
        length = taken.stop - taken.start
        yield block, taken, zero.new_zeros(len(zero), share.inputs.group, length, zero.shape[-1])


def smat_backward(
    inputs: Inputs, grad_out: Tensor, out: Tensor, normalizer: Tensor, tables: Tensor
) -> dict[str, Tensor]:
    """Find the gradient of every differentiable input, by name."""
    given = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    grads = {name: torch.empty_like(x) for name, x in given.items() if x is not None}
    for share in inputs.shares(tables, (grad_out, out, normalizer)):
        distant = share.long_range.backward() if inputs.branch != "causal" else None
        moved = None
        if share.decay is not None:
            moved = torch.zeros_like(share.decay.total[:, 1:])
        for recent in _recent_backward(share):
            _put_grads(share, recent, distant, moved, grads)
        if moved is not None and inputs.log_decay is not None:
            share.put_keys(
                grad_log_decay(moved, share.of_keys(inputs.log_decay)), grads["log_decay"]
            )
    return grads


def _recent_backward(share: Share) -> Iterator[BlockGrads]:
    """Yield the causal branch's gradients; zeros if it was not asked."""
    causal = share.causal
    if share.inputs.branch != "long_range":
        yield from causal.backward()
        return
    for block, taken in zip(causal.blocks, causal.taken(), strict=True):
        span = slice(block.start, block.stop)
        phi, psi, v = share.phi(taken), share.psi(span), share.v(span)
        zero_phi, zero_psi, zero_v = (torch.zeros_like(x) for x in (phi, psi, v))
        yield BlockGrads(block, taken, zero_phi, zero_psi, zero_v, phi, psi)


def _put_grads(
    share: Share,
    recent: BlockGrads,
    distant: LongRangeGrads | None,
    moved: Tensor | None,
    grads: dict[str, Tensor],
) -> None:
    """Add both branches' gradients of a block, and take them through gates and features."""
    inputs, block, taken = share.inputs, recent.block, recent.taken
    span = slice(block.start, block.stop)
    grad_phi, grad_psi, grad_v = recent.phi, recent.psi, recent.v
    far = None
    if distant is not None:
        seen = distant.phi.of(block.boundary, taken)
        if grad_phi is not None and seen is not None:
            grad_phi = grad_phi + seen
        if block.stop <= distant.psi.shape[1]:
            far, grad_v = distant.psi[:, span], grad_v + distant.v[:, span]
    if inputs.read_weight is not None:
        pulled_reads = None if distant is None else distant.read_weight.of(block.boundary, taken)
        if pulled_reads is None:
            pulled_reads = torch.zeros_like(share.of_queries(inputs.read_weight, taken))
        share.put_queries(pulled_reads, grads["read_weight"], taken)
    psi = recent.psi_value
    features = psi if inputs.key_gate is None else share.key_features(span)
    if inputs.write_weight is not None:
        weight = share.of_keys(inputs.write_weight, span).to(grad_psi.dtype)
        pulled = torch.zeros_like(weight) if far is None else (psi * far).sum(-1)
        share.put_keys(pulled, grads["write_weight"], span)
        far = None if far is None else far * weight.unsqueeze(-1)
    grad_psi = grad_psi if far is None else grad_psi + far
    if moved is not None:
        moved[:, span] -= (psi * grad_psi).sum(-1)
    if grad_phi is not None:
        phi = recent.phi_value
        assert phi is not None
        if moved is not None:
            at = torch.arange(block.start, block.stop, device=phi.device)
            at = at if share.positions is None else share.positions[taken]
            moved.index_add_(1, at, (phi * grad_phi).sum((1, -1)).double())
        grad_q = pointwise_backward_(inputs.feature_map, phi, grad_phi)
        share.put_queries(grad_q, grads["q"], taken)
    if inputs.key_gate is not None:
        share.put_keys((features * grad_psi).sum(-1), grads["key_gate"], span)
        gate = share.of_keys(inputs.key_gate, span).to(grad_psi.dtype)
        grad_psi = grad_psi * gate.unsqueeze(-1)
    grad_k = pointwise_backward_(inputs.feature_map, features, grad_psi)
    share.put_keys(grad_k, grads["k"], span)
    share.put_keys(grad_v[..., : inputs.v.shape[-1]], grads["v"], span)
