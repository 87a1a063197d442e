"""The gradient of the bins that a token did not write to (appendix "Learning the discrete hash").

Interpolation would write (1 - f) to the token's own bin and f to the next one of a coordinate. The
weights are rounded to 1 and 0, and only their slopes stay: -1 in the own bin, which `ste_weight`
has, and +1 in the next one. What goes there has a weight of exactly 0, so no value changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from smat.geometry import Geometry
from smat.geometry.field import from_digits
from smat.masks import SMatMask
from smat.ops import smat_attention
from smat.ops.smat.routing import Routing


def neighbour_routings(
    routing: Routing, bin_position: Tensor, geometry: Geometry
) -> tuple[Routing, ...]:
    """Return a routing for each coordinate, that writes to the next bin with a weight of 0.

    >>> import torch
    >>> position = torch.tensor([[[[0.5, 2.5]]]], requires_grad=True)  # bins 0 and 2 of 3
    >>> found = neighbour_routings(Routing(), position, Geometry(3, 3))
    >>> [each.profile.item() for each in found], found[0].write_weight.item()
    ([5, 2], 0.0)

    The last bin is its own neighbour: there the slopes cancel, as in the paper's min(a + 1, q - 1).
    """
    lower = bin_position.detach().floor().nan_to_num(nan=0.0).long()
    last, detached = (
        geometry.field_size - 1,
        Routing(*(x if x is None else x.detach() for x in routing)),
    )
    found = []
    for axis in range(geometry.ambient_dim):
        digits = lower.clone()
        digits[..., axis] = (digits[..., axis] + 1).clamp(max=last)
        along = bin_position[..., axis]
        weight = along - along.detach()
        if detached.write_weight is not None:
            weight = weight * detached.write_weight
        profile = from_digits(digits, geometry.field_size)
        found.append(detached._replace(profile=profile, write_weight=weight))
    return tuple(found)


def with_neighbours(
    out: Tensor,
    neighbours: Iterable[Routing],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SMatMask,
    log_decay: Tensor | None = None,
    **given: Any,
) -> Tensor:
    """Add to an output what is read of neighbouring bins: 0, with a gradient for the hash alone."""
    log_decay = None if log_decay is None else log_decay.detach()
    for each in neighbours:
        read, _ = smat_attention(
            q.detach(), k.detach(), v.detach(), mask, feature_map="identity", normalize=False,
            branch="long_range", log_decay=log_decay, **each._asdict(), **given,
        )  # fmt: skip
        out = out + read
    return out
