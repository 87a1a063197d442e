"""What keeps a learned hash spread out over hyperplanes, and how balance losses are used."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from smat.distributed import Share
from smat.distributed.exchange import total
from smat.geometry import Geometry
from smat.geometry.field import from_digits


def hyperplane_balance(
    bin_position: Tensor,
    geometry: Geometry,
    weight: Tensor,
    share: Share | None = None,
) -> Tensor:
    """Measure how unevenly hyperplanes are written to: 0 if evenly, log q if one takes all.

    >>> geometry = Geometry(vc_dim=3, field_size=3)
    >>> every_point = torch.tensor([[x, y] for x in (0.0, 1.0, 2.0) for y in (0.0, 1.0, 2.0)])
    >>> diagonal = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])  # even by coordinates
    >>> for points in (every_point, diagonal):
    ...     position = points.view(1, -1, 1, 2)
    ...     print(round(hyperplane_balance(position, geometry, torch.ones(1, 1, 1)).item(), 3))
    0.0
    0.275

    1/A sum_a sum_b p_ab log(q p_ab), p_ab the part of all that is written which lies on H_(a,b),
    averaged over heads: `balance_loss` asks this of the D axes alone, and points that are all on
    one line across them pass it. A token is interpolated between neighbouring bins, as there.

    `bin_position` is (B, T, H, D); `weight` (B, T, H), or what expands to it, says how much a token
    writes, 0 for one that does not count. At d = 1 the loss is 0. O(2^D B T H + H q^D).
    """
    heads, field_size = bin_position.shape[2], geometry.field_size
    if geometry.ambient_dim == 0:
        return bin_position.sum()
    weight = weight.to(bin_position.dtype).expand(bin_position.shape[:-1])
    position = bin_position.masked_fill((weight == 0).unsqueeze(-1), 0)
    lower = position.detach().floor()
    beyond, bins = position - lower, lower.nan_to_num(nan=0.0).long()
    column = geometry.num_profiles * torch.arange(heads, device=position.device)
    mass = position.new_zeros(heads * geometry.num_profiles)
    for corner in itertools.product((0, 1), repeat=geometry.ambient_dim):
        step = torch.tensor(corner, device=position.device)
        point = from_digits((bins + step).clamp(0, field_size - 1), field_size)
        part = torch.where(step.bool(), beyond, 1 - beyond).prod(-1) * weight
        mass = mass.index_add(0, (column + point).flatten(), part.flatten())
    written = weight.sum((0, 1))
    if share is not None:
        mass, written = total(mass, share), total(written, share)
    tiny = torch.finfo(mass.dtype).tiny
    mean = mass.view(heads, -1) / written.clamp(min=tiny).unsqueeze(-1)
    on_planes = _on_hyperplanes(mean, geometry.vc_dim, field_size)
    logs = (field_size * on_planes).clamp(min=tiny).log()
    return (on_planes * logs).sum() / (heads * geometry.num_directions)


# An operator of its own, for compilers: the tables of a geometry are cached.
@torch.library.custom_op("smat::on_hyperplanes", mutates_args=())
def _on_hyperplanes(mass: Tensor, vc_dim: int, field_size: int) -> Tensor:
    """Add up the mass of points (H, P) on every hyperplane: (H, B)."""
    return Geometry(vc_dim, field_size).tabulate(mass.unsqueeze(-1)).squeeze(-1)


@_on_hyperplanes.register_fake
def _(mass: Tensor, vc_dim: int, field_size: int) -> Tensor:
    return mass.new_empty(len(mass), Geometry(vc_dim, field_size).num_types)


def _keep_geometry(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.geometry = inputs


def _pull_to_points(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    geometry = Geometry(*ctx.geometry)
    return geometry.backproject(grad.contiguous().unsqueeze(-1)).squeeze(-1), None, None


_on_hyperplanes.register_autograd(_pull_to_points, setup_context=_keep_geometry)


def balance_weight(step: int, weight: float = 0.01, anneal_steps: int = 1000) -> float:
    """Return beta_bal at a training step: it falls linearly to 0, or never in 0 steps.

    >>> [balance_weight(step) for step in (0, 500, 1000, 5000)]
    [0.01, 0.005, 0.0, 0.0]
    """
    if step < 0 or anneal_steps < 0:
        raise ValueError(f"steps must not be negative, got {step} and {anneal_steps}")
    return weight if anneal_steps == 0 else weight * max(0.0, 1 - step / anneal_steps)


def sum_balance_losses(model: nn.Module) -> Tensor | None:
    """Add up the losses that routed layers of a model left after its last call; None without any.

    >>> layer = nn.Linear(1, 1)
    >>> layer.balance_loss = torch.tensor(0.5)  # as memories, content routings and routers do
    >>> sum_balance_losses(nn.Sequential(layer, nn.Linear(1, 1)))
    tensor(0.5000)
    """
    losses = [getattr(module, "balance_loss", None) for module in model.modules()]
    found = [loss for loss in losses if isinstance(loss, Tensor)]
    return torch.stack(found).sum() if found else None
