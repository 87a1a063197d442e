"""Write addresses: a learned hash of the layer input into F_q^(d-1) (appendix "Extension Details").

    c_t = sum_l K_l h_(t-l)                      depthwise, width 4, zeros before the sequence
    z_k = gamma_k <w_k / |w_k|, LN(c_t)> + b_k   one for each head and coordinate
    s_k = clip(q Phi(z_k), 0, q - eps)           Phi the normal CDF
    x_t = (floor s_1, ..., floor s_D)            the profile

The paper's c_t is `write_input`, x_theta the profile, s `bin_position`, omega `ste_weight`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smat.geometry import Geometry
from smat.geometry.field import from_digits
from smat.layers.short_convolution import ShortConvolution


class WriteAddress(NamedTuple):
    """Where tokens write, `profile` (..., H), with what straight-through weight (..., H).

    `bin_position` (..., H, D) is s of the paper, from which the balance loss is computed.
    """

    profile: Tensor
    ste_weight: Tensor
    bin_position: Tensor


class HashProjection(nn.Module):
    """Hash write-side representations into the points of one geometry, for each head.

    >>> projection = HashProjection(hidden_size=8, num_heads=2, geometry=Geometry(3, 5))
    >>> address = projection(torch.randn(4, 10, 8))
    >>> address.profile.shape, bool((address.ste_weight == 1).all())
    (torch.Size([4, 10, 2]), True)

    omega = prod_k [1 + (1 - f_k) - sg(1 - f_k)] is 1, and its derivative by s_k is -1: a one-sided,
    biased estimate. A loss that gains from a larger write pulls s towards the bin's lower edge.

    Addresses are found in fp32 or wider, whatever the input is. One that is not finite gives a
    weight that is not. Cost: T hidden_size (d - 1) a head.
    Paper: w = `weight`, gamma = `gain`, b = `bias`.
    """

    def __init__(self, hidden_size: int, num_heads: int, geometry: Geometry) -> None:
        super().__init__()
        if hidden_size < 1 or num_heads < 1:
            raise ValueError(f"sizes must be 1 or more, got {hidden_size} and {num_heads} heads")
        self.geometry = geometry
        shape = (num_heads, geometry.ambient_dim)
        self.weight = nn.Parameter(torch.empty(*shape, hidden_size))
        self.gain = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw directions at random; gain 1 and bias 0 spread a normal input over all bins."""
        nn.init.normal_(self.weight)
        nn.init.ones_(self.gain)
        nn.init.zeros_(self.bias)

    def forward(self, write_input: Tensor) -> WriteAddress:
        """Hash (..., hidden_size)."""
        position = self.bin_position(write_input)
        lower = position.detach().floor()
        remaining = 1 - (position - lower)
        # In this order the sum is exactly 1.
        ste_weight = (1 + (remaining - remaining.detach())).prod(-1)
        profile = from_digits(lower.nan_to_num(nan=0.0).long(), self.geometry.field_size)
        return WriteAddress(profile, ste_weight, position)

    def bin_position(self, write_input: Tensor) -> Tensor:
        """Find s, (..., hidden_size) -> (..., H, D), in [0, q)."""
        dtype = torch.promote_types(write_input.dtype, torch.float32)
        with torch.autocast(write_input.device.type, enabled=False):
            normed = F.layer_norm(write_input.to(dtype), write_input.shape[-1:])
            direction = F.normalize(self.weight.to(dtype), dim=-1)
            along = F.linear(normed, direction.flatten(0, 1)).unflatten(-1, self.gain.shape)
            z = self.gain.to(dtype) * along + self.bias.to(dtype)
            field_size = self.geometry.field_size
            last = field_size * (1 - 2 * torch.finfo(dtype).eps)
            return (field_size * torch.special.ndtr(z)).clamp(0, last)


class LearnedHash(nn.Module):
    """Write addresses from the layer input: one convolution, one projection for each field size.

    >>> learned_hash = LearnedHash(hidden_size=8, num_heads=2, geometry=Geometry(3, 5))
    >>> hidden = torch.randn(4, 10, 8)
    >>> address = learned_hash(hidden)
    >>> address.profile.shape, address.profile.dtype
    (torch.Size([4, 10, 2]), torch.int64)
    >>> last = learned_hash(hidden[:, 9:], state=learned_hash.conv.next_state(hidden[:, :9]))
    >>> torch.allclose(last.bin_position, address.bin_position[:, 9:], atol=1e-4)
    True

    An address depends on its own token and the three before it, and is never revised. The
    convolution passes over the boundary of the local branch: a key may be written before its value.
    The state is the convolution's: the last three inputs, (B, 3, hidden_size).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        geometry: Geometry | Iterable[Geometry],
        conv_width: int = 4,
    ) -> None:
        super().__init__()
        self.conv = ShortConvolution(hidden_size, conv_width, activation=False)
        self.projections = nn.ModuleDict(
            {key: HashProjection(hidden_size, num_heads, g) for key, g in keyed(geometry)}
        )

    def forward(
        self,
        hidden: Tensor,
        geometry: Geometry | None = None,
        state: Tensor | None = None,
        first_visible: Tensor | None = None,
    ) -> WriteAddress:
        """Hash (B, T, hidden_size), after the inputs in `state` if given.

        The geometry may stay out if there is only one. `first_visible` (1, T) keeps packed
        sequences apart.
        """
        write_input = self.conv(hidden, state, first_visible)
        return of_geometry(self.projections, geometry)(write_input)


def keyed(geometry: Geometry | Iterable[Geometry]) -> list[tuple[str, Geometry]]:
    """Name geometries by their field size, each once.

    >>> keyed([Geometry(3, 7), Geometry(3, 5), Geometry(3, 7)])
    [('5', Geometry(vc_dim=3, field_size=5)), ('7', Geometry(vc_dim=3, field_size=7))]
    """
    several = [geometry] if isinstance(geometry, Geometry) else list(geometry)
    by_size = {each.field_size: each for each in several}
    if not by_size or len({each.vc_dim for each in several}) > 1:
        raise ValueError(f"one VC dimension and at least one field size are needed, got {several}")
    return [(str(size), each) for size, each in sorted(by_size.items())]


def of_geometry(modules: nn.ModuleDict, geometry: Geometry | None) -> Any:
    """Find the module of a geometry's field size; the only one if no geometry is given."""
    if geometry is None and len(modules) == 1:
        return next(iter(modules.values()))
    key = "" if geometry is None else str(geometry.field_size)
    if key not in modules:
        raise ValueError(
            f"parameters exist for the field sizes {', '.join(modules)}, "
            f"got {'no geometry' if geometry is None else f'field size {key}'}"
        )
    return modules[key]
