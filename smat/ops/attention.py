"""SMat-Attention, forward and backward (Algorithm 1, and the adjoints of the appendix)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from smat.ops.causal import BlockGrads, CausalBranch
from smat.ops.decay import grad_log_decay
from smat.ops.feature_maps import pointwise_backward_
from smat.ops.long_range import LongRangeGrads
from smat.ops.pieces import Block
from smat.ops.rows import Inputs, Share, inverse_or_zero
from smat.ops.tiles import sum_heads

DIFFERENTIABLE = ("q", "k", "v", "log_decay", "key_gate", "write_weight", "read_weight")


def smat_forward(inputs: Inputs, num_kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Run Algorithm 1: the output (B, R, H, V), the normaliser (B, R, H), and kept type tables.

    All come in the dtype of the sums: the backward pass subtracts the output from the values, and
    where gates are strong an output rounded to half precision would drown what is left.
    """
    v, shape = inputs.v, inputs.answer_shape
    out = v.new_empty(*shape, v.shape[-1], dtype=inputs.dtype)
    normalizer = v.new_empty(shape, dtype=inputs.dtype)
    tables = v.new_empty(num_kept, dtype=inputs.dtype)
    for share in inputs.shares(tables):
        # Lines 2-4: pool by profile, tabulate, read by type.
        long_range = share.long_range
        distant = long_range.forward() if inputs.branch != "causal" else None
        # Lines 5-7: chunk sums, exclusive scan within each window, dense tiles; add, divide once.
        for block, taken, y in _recent(share, share.causal(long_range)):
            seen = None if distant is None else distant.of(block.boundary, taken)
            y = y if seen is None else y + seen.view_as(y)
            if inputs.normalize:
                y, total = y[..., :-1], y[..., -1]
                share.put_answers(total, normalizer, taken)
                y = y * inverse_or_zero(total).unsqueeze(-1)
            share.put_answers(y, out, taken)
            del y  # the next block can use its memory, which is in cache
    return out, normalizer, tables


def _recent(share: Share, causal: CausalBranch) -> Iterator[tuple[Block, slice, Tensor]]:
    """Yield what the causal branch answers; nothing but zeros if it is not asked."""
    if share.inputs.branch != "long_range":
        yield from causal.forward()
        return
    zero = share.zero_state()
    shape = (share.num_values, share.num_rows, share.inputs.group)
    for block, taken in zip(causal.blocks, causal.taken(), strict=True):
        yield block, taken, zero.new_zeros(*shape, taken.stop - taken.start, zero.shape[-1])


def smat_backward(
    inputs: Inputs, grad_out: Tensor, out: Tensor, normalizer: Tensor, tables: Tensor
) -> dict[str, Tensor]:
    """Find the gradient of every differentiable input, by name."""
    given = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    # Shares add to what heads of values have in common, q and k, in the dtype of the sums.
    shared = ("q", "k", "key_gate") if inputs.num_values > 1 else ()
    grads = {
        name: torch.empty_like(x, dtype=inputs.dtype if name in shared else x.dtype)
        for name, x in given.items()
        if x is not None
    }
    for share in inputs.shares(tables, (grad_out, out, normalizer)):
        long_range = share.long_range
        distant = long_range.backward() if inputs.branch != "causal" else None
        moved = None if inputs.log_decay is None else _moved_by_answers(share)
        for recent in _recent_backward(share, share.causal(long_range)):
            _put_grads(share, recent, distant, moved, grads)
            del recent  # the next block can use its memory, which is in cache
        if moved is not None and inputs.log_decay is not None:
            grad = grad_log_decay(moved, share.of_values(inputs.log_decay))
            share.put_values(grad, grads["log_decay"])
    return {name: grad.to(given[name].dtype) for name, grad in grads.items()}


def _recent_backward(share: Share, causal: CausalBranch) -> Iterator[BlockGrads]:
    """Yield the causal branch's gradients; zeros if it was not asked."""
    if share.inputs.branch != "long_range":
        yield from causal.backward()
        return
    for block, taken in zip(causal.blocks, causal.taken(), strict=True):
        span = slice(block.start, block.stop)
        phi, psi, v = share.phi(taken), share.psi(span), share.v(span)
        zero_phi, zero_psi, zero_v = (torch.zeros_like(x) for x in (phi, psi, v))
        yield BlockGrads(block, taken, zero_phi, zero_psi, zero_v, phi, psi, v)


def _moved_by_answers(share: Share) -> Tensor:
    """Find what answers give to the gradient of lambda, (M, N, T): <y_i, y_bar_i>.

    Where y is divided by a column of its own, it has none of its size.
    """
    inputs, answer = share.inputs, share.answer
    assert inputs.log_decay is not None
    assert answer is not None
    moved = torch.zeros_like(share.of_values(inputs.log_decay), dtype=torch.float64)
    if not inputs.normalize:
        grad_out, out = (share.of_answers(x) for x in answer[:2])
        by_query = (grad_out * out).sum((2, -1)).double()
        if share.positions is None:
            moved += by_query
        else:
            moved.index_add_(-1, share.positions, by_query)
    return moved


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
            grad_phi = grad_phi + sum_heads(seen.unflatten(0, (share.num_values, -1)))
        if block.stop <= distant.psi.shape[1]:
            far = distant.psi[:, span].unflatten(0, (share.num_values, -1))
            grad_v = grad_v + distant.v[:, span].view_as(grad_v)
    if inputs.read_weight is not None:
        pulled_reads = None if distant is None else distant.read_weight.of(block.boundary, taken)
        of_reads = share.of_answers(grads["read_weight"], taken)
        if pulled_reads is None:
            pulled_reads = torch.zeros_like(of_reads)
        share.put_answers(pulled_reads.view(of_reads.shape), grads["read_weight"], taken)
    psi = recent.psi_value
    features = psi if inputs.key_gate is None else share.key_features(span)
    if inputs.write_weight is not None:
        weight = share.of_values(inputs.write_weight, span).to(grad_psi.dtype)
        pulled = torch.zeros_like(weight) if far is None else (psi * far).sum(-1)
        share.put_values(pulled, grads["write_weight"], span)
        far = None if far is None else far * weight.unsqueeze(-1)
    grad_psi = grad_psi if far is None else grad_psi + sum_heads(far)
    if moved is not None:
        moved[..., span] -= (recent.v_value * grad_v).sum(-1)
    if grad_phi is not None:
        assert recent.phi_value is not None
        grad_q = pointwise_backward_(inputs.feature_map, recent.phi_value, grad_phi)
        share.put_queries(grad_q, grads["q"], taken)
    if inputs.key_gate is not None:
        share.put_keys((features * grad_psi).sum(-1), grads["key_gate"], span)
        gate = share.of_keys(inputs.key_gate, span).to(grad_psi.dtype)
        grad_psi = grad_psi * gate.unsqueeze(-1)
    grad_k = pointwise_backward_(inputs.feature_map, features, grad_psi)
    share.put_keys(grad_k, grads["k"], span)
    share.put_values(grad_v[..., : inputs.v.shape[-1]], grads["v"], span)
