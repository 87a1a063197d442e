"""The long-range branch, as the native backend has it (equation 6, adjoint 11)."""

from __future__ import annotations

from torch import Tensor

from smat.masks import Segment
from smat.ops.feature_maps import divide_backward, pointwise_backward_
from smat.ops.smat import long_range as in_torch
from smat.ops.smat.attention import Loaded, _distant_backward, cut_slices
from smat.ops.smat.routing import Inputs, Options


def long_range(
    inputs: Inputs,
    options: Options,
    segments: tuple[Segment, ...],
    out: Tensor,
    normalizer: Tensor,
) -> None:
    """Write what queries of one sequence see of distant keys: the numerator, the normaliser.

    Of the output (B, T, H, V) and (B, T, H), the rows before the first such query are left alone.
    """
    for part in cut_slices(inputs.k, inputs.v, None):
        loaded = Loaded(part, inputs, options)
        first, y = in_torch.long_range(*loaded.distant_arguments(), options.mask, segments)
        into, total = part.of_values(out)[:, :, :, first:], part.of_values(normalizer)
        y = y.view(*into.shape[:4], -1)
        into.copy_(y[..., : into.shape[-1]])
        if options.normalize:
            total[..., first:].copy_(y[..., -1])


def long_range_backward(
    inputs: Inputs,
    options: Options,
    segments: tuple[Segment, ...],
    grad_out: Tensor,
    out: Tensor,
    normalizer: Tensor,
    grads: dict[str, Tensor],
) -> None:
    """Add the gradients of one sequence, taken through gates and features, to all there are."""
    name = options.feature_map
    for part in cut_slices(inputs.k, inputs.v, None):
        loaded = Loaded(part, inputs, options)
        grad, answer, total = (part.of_values(x).flatten(0, 1) for x in (grad_out, out, normalizer))
        grad_y = divide_backward(grad, answer, total) if options.normalize else grad.contiguous()
        found = _distant_backward(loaded, grad_y, grads)
        assert found is not None
        phi, grad_psi, num_distant = loaded.phi, found.psi, found.psi.shape[1]
        first, features = phi.shape[2] - found.phi.shape[2], loaded.features[:, :num_distant]
        _add(
            part.of_keys(grads["q"])[:, :, :, first:],
            pointwise_backward_(name, phi[:, :, first:], found.phi),
        )
        if loaded.key_gate is not None:
            _add(part.of_keys(grads["key_gate"])[..., :num_distant], (features * grad_psi).sum(-1))
            grad_psi = grad_psi * loaded.key_gate[:, :num_distant]
        grad_psi = pointwise_backward_(name, features, grad_psi)
        _add(part.of_keys(grads["k"])[:, :, :, :num_distant], grad_psi)
        into = part.of_values(grads["v"])[:, :, :, :num_distant]
        _add(into, found.v[..., : into.shape[-1]])
        if found.log_decay is not None:
            _add(part.of_values(grads["log_decay"]), found.log_decay)


def _add(onto: Tensor, x: Tensor) -> None:
    onto += x.reshape(onto.shape)
