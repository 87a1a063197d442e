"""The long-range branch, as the native backend has it (equation 6, adjoint 11)."""

from __future__ import annotations

from torch import Tensor

from smat.masks import Segment
from smat.ops.smat import long_range as in_torch
from smat.ops.smat.attention import Loaded, cut_slices
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


def long_range_backward() -> None:
    pass
