"""What a learned hash would write to neighbouring bins (appendix "Learning the discrete hash")."""

from __future__ import annotations

from torch import Tensor

from smat.geometry import Geometry
from smat.geometry.field import from_digits
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

    Interpolation would write 1 - f to a token's own bin and f to the next one of a coordinate
    (appendix "Learning the discrete hash"). Rounded to 1 and 0 only the slopes stay: -1 in the own
    bin, which `ste_weight` has, and +1 in the next. The last bin is its own neighbour: there the
    slopes cancel, as in the paper's min(a + 1, q - 1).
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
