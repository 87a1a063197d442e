"""SMat-Attention, forward and backward (Algorithm 1, and the adjoints of the appendix)."""

from __future__ import annotations

import torch
from torch import Tensor

from smat.ops.decay import grad_log_decay
from smat.ops.feature_maps import pointwise_backward_
from smat.ops.rows import Inputs, Rows, Share


def smat_forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Run Algorithm 1: the output (B, R, H, V) and the normaliser (B, R, H).

    Both come in the dtype of the sums: the backward pass subtracts the output from the values, and
    where gates are strong an output rounded to half precision would drown what is left.
    """
    q, v = inputs.q, inputs.v
    out = v.new_empty(*q.shape[:3], v.shape[-1], dtype=inputs.dtype)
    normalizer = v.new_empty(*q.shape[:3], dtype=inputs.dtype)
    for share in inputs.shares():
        rows = share.load()  # line 1: phi and psi; the products psi v' are never formed
        y = rows.phi.new_zeros(*rows.phi.shape[:3], rows.v.shape[-1])
        # Lines 2-4: pool by profile, tabulate, read by type.
        if inputs.branch != "causal":
            rows.long_range.forward(rows.phi, y)
        # Lines 5-7: chunk sums, exclusive scan within each window, dense tiles.
        if inputs.branch != "long_range":
            rows.causal.forward(rows.phi, y)
        if inputs.normalize:
            y, total = y[..., :-1], y[..., -1]
            share.put_queries(total, normalizer)
            y = y * _inverse(total).unsqueeze(-1)
        share.put_queries(y, out)
    return out, normalizer


def _inverse(normalizer: Tensor) -> Tensor:
    """Invert normalisers; a row that saw nothing has normaliser 0 and output 0.

    So has a row whose weights all fell below the smallest normal number, where 1 / s overflows.
    """
    sees_nothing = normalizer.abs() < torch.finfo(normalizer.dtype).tiny
    return torch.where(sees_nothing, 0.0, normalizer.reciprocal())


def smat_backward(
    inputs: Inputs, grad_out: Tensor, out: Tensor, normalizer: Tensor
) -> dict[str, Tensor]:
    """Find the gradient of every differentiable input, by name."""
    differentiable = ("q", "k", "v", "log_decay", "key_gate", "write_weight")
    given = {name: getattr(inputs, name) for name in differentiable}
    grads = {name: torch.zeros_like(x) for name, x in given.items() if x is not None}
    for share in inputs.shares():
        rows = share.load()
        grad_y = _grad_y(share, grad_out, out, normalizer)
        grad_phi = torch.zeros_like(rows.phi)
        grad_psi, grad_v = torch.zeros_like(rows.psi), torch.zeros_like(rows.v)
        grad_far = grad_psi if rows.far is rows.psi else torch.zeros_like(rows.psi)
        if inputs.branch != "causal":
            rows.long_range.backward(rows.phi, grad_y, grad_phi, grad_far, grad_v)
        if inputs.branch != "long_range":
            rows.causal.backward(rows.phi, grad_y, grad_phi, grad_psi, grad_v)
        _put_grads(share, rows, (grad_phi, grad_psi, grad_far, grad_v), grads)
    return grads


def _grad_y(share: Share, grad_out: Tensor, out: Tensor, normalizer: Tensor) -> Tensor:
    """Take the gradient through the division: (g / s, -(g . o) / s) for o = y / s."""
    grad = share.queries(grad_out).to(share.inputs.dtype)
    if not share.inputs.normalize:
        return grad.contiguous()
    inverse = _inverse(share.queries(normalizer)).unsqueeze(-1)
    dot = (grad * share.queries(out)).sum(-1, keepdim=True)
    return torch.cat([grad, -dot], dim=-1).mul_(inverse)


def _put_grads(
    share: Share,
    rows: Rows,
    computed: tuple[Tensor, Tensor, Tensor, Tensor],
    grads: dict[str, Tensor],
) -> None:
    """Take the gradients of the arrays through gates and features to the op's inputs."""
    inputs = share.inputs
    grad_phi, grad_psi, grad_far, grad_v = computed
    if inputs.write_weight is not None:
        share.put_keys((rows.psi * grad_far).sum(-1), grads["write_weight"])
        weight = share.keys(inputs.write_weight).to(grad_psi.dtype)
        grad_psi = grad_psi.addcmul_(grad_far, weight.unsqueeze(-1))
    if inputs.log_decay is not None:
        log_decay = share.keys(inputs.log_decay)
        grad = grad_log_decay(rows.phi, grad_phi, rows.psi, grad_psi, log_decay, share.positions)
        share.put_keys(grad, grads["log_decay"])
    if inputs.key_gate is not None:
        share.put_keys((rows.key_features * grad_psi).sum(-1), grads["key_gate"])
        grad_psi *= share.keys(inputs.key_gate).to(grad_psi.dtype).unsqueeze(-1)
    name = inputs.feature_map
    share.put_queries(pointwise_backward_(name, rows.phi, grad_phi), grads["q"])
    share.put_keys(pointwise_backward_(name, rows.key_features, grad_psi), grads["k"])
    share.put_keys(grad_v[..., : inputs.v.shape[-1]], grads["v"])
