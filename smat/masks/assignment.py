"""Give keys a profile and queries a type: by position, by hashed content, by rule (Section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from smat.geometry import Geometry
from smat.geometry.field import check_index, from_digits


def positional_profile(geometry: Geometry, position: Tensor) -> Tensor:
    """Deal the points out to the keys in turn: prof(j) = j mod P.

    >>> positional_profile(Geometry(vc_dim=2, field_size=3), torch.arange(5))
    tensor([0, 1, 2, 0, 1])

    Paper: j - 1 = `position` (0-based here), P = `geometry.num_profiles`.
    """
    return position.long() % geometry.num_profiles


def positional_type(geometry: Geometry, recent_index: Tensor) -> Tensor:
    """Deal the hyperplanes out to the recent queries in turn: type(i) = i mod B, i from 1.

    >>> positional_type(Geometry(vc_dim=2, field_size=3), torch.arange(5))
    tensor([1, 2, 0, 1, 2])

    Paper: i - 1 = `recent_index` (0-based here), B = `geometry.num_types`.
    """
    return (recent_index.long() + 1) % geometry.num_types


@dataclass(frozen=True)
class TokenHash:
    """A fixed random map from token ids to profile cells, one for each head.

    >>> token_hash = TokenHash(vocab_size=100, num_heads=4, geometry=Geometry(3, 5), seed=1)
    >>> cells = token_hash.profile(torch.tensor([[7, 9, 7]]))
    >>> cells.shape
    torch.Size([1, 3, 4])
    >>> bool((cells[0, 0] == cells[0, 2]).all())  # a repeated token falls into the same cell
    True

    Paper: x = `table`, one row a head; u_t = `profile(token_ids)[:, t]`. Heads draw their tables
    apart, so that tokens which collide in one head are told apart by another.
    """

    vocab_size: int
    num_heads: int
    geometry: Geometry
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "num_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, but it is {getattr(self, name)}")

    def table(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the cell of every token in every head, `(H, vocab_size)` long."""
        return _hash_table(self, torch.device(device)).clone()

    def profile(self, token_ids: Tensor) -> Tensor:
        """Look the cells of tokens up: `(B, T)` -> `(B, T, H)`."""
        if token_ids.ndim != 2:
            raise ValueError(
                f"token_ids must be (B, T), but their shape is {tuple(token_ids.shape)}"
            )
        check_index("token_ids", token_ids, self.vocab_size)
        return _hash_table(self, token_ids.device)[:, token_ids.long()].movedim(0, -1)


@lru_cache(maxsize=32)
def _hash_table(token_hash: TokenHash, device: torch.device) -> Tensor:
    # Drawn on the CPU whatever the device, so that a seed means one table everywhere.
    generator = torch.Generator().manual_seed(token_hash.seed)
    shape = (token_hash.num_heads, token_hash.vocab_size)
    num_profiles = token_hash.geometry.num_profiles
    return torch.randint(num_profiles, shape, generator=generator).to(device)


def type_through_cell(geometry: Geometry, direction_index: Tensor, profile: Tensor) -> Tensor:
    """Take the hyperplane with a given direction through a query's own cell.

    >>> geometry = Geometry(vc_dim=3, field_size=5)
    >>> type_through_cell(geometry, torch.tensor([0, 1]), torch.tensor([7, 7]))
    tensor([1, 8])

    type(i) = H_(a, a . u), so a query sees every distant key whose token repeats its own.

    Paper: a = `direction_index`, u = `profile`; both broadcast.
    """
    offset = geometry.offset_of(direction_index, profile)
    return geometry.type_index(direction_index, offset)


def agreeing_direction(geometry: Geometry, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Find a direction along which all given cells lie on one hyperplane: `(..., k)` -> `(...)`.

    >>> geometry = Geometry(vc_dim=3, field_size=5)
    >>> direction, exists = agreeing_direction(geometry, torch.tensor([[7, 11], [0, 0]]))
    >>> direction, exists
    (tensor([1, 0]), tensor([True, True]))
    >>> type_through_cell(geometry, direction[0], torch.tensor([7, 11]))  # one line holds both
    tensor([8, 8])

    The first direction a with a . u_1 = ... = a . u_k, and whether there is one; where there is
    none, direction 0. Up to D = d - 1 cells always lie on one hyperplane.

    Paper: u_1, ..., u_k = `cells`.
    """
    if cells.ndim < 1 or cells.shape[-1] < 1:
        raise ValueError(f"cells must be (..., k) with k >= 1, but they are {tuple(cells.shape)}")
    check_index("cells", cells, geometry.num_profiles)
    if geometry.ambient_dim == 0:
        flat = torch.zeros(cells.shape[:-1], dtype=torch.long, device=cells.device)
        return flat, torch.ones_like(flat, dtype=torch.bool)
    place = geometry.points(cells.device)[cells.long()]
    apart = from_digits(
        (place[..., 1:, :] - place[..., :1, :]) % geometry.field_size, geometry.field_size
    )
    orthogonal = _orthogonal(geometry, cells.device)
    agrees = torch.ones(
        *cells.shape[:-1], geometry.num_directions, dtype=torch.bool, device=cells.device
    )
    for difference in apart.unbind(-1):
        agrees &= orthogonal[difference]
    exists = agrees.any(-1)
    return agrees.byte().argmax(-1), exists


@lru_cache(maxsize=32)
def _orthogonal(geometry: Geometry, device: torch.device) -> Tensor:
    """Mark the directions with a . x = 0 for every point x, `(P, A)` bool."""
    # fp64 holds these small integers exactly, and integer products are slow or missing on a GPU.
    product = geometry.points(device).double() @ geometry.directions(device).double().T
    return product % geometry.field_size == 0
