"""Give keys a profile and queries a type by content: hashed tokens and rules (Section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from smat.geometry import Geometry
from smat.geometry.field import check_index, check_integer, from_digits, offsets, to_digits


@dataclass(frozen=True)
class TokenHash:
    """A fixed random map from token ids to profile cells, one for each head.

    >>> token_hash = TokenHash(vocab_size=100, num_heads=4, geometry=Geometry(3, 5), seed=1)
    >>> cells = token_hash.profile(torch.tensor([[7, 9, 7]]))
    >>> cells.shape
    torch.Size([1, 3, 4])
    >>> bool((cells[0, 0] == cells[0, 2]).all())  # a repeated token falls into the same cell
    True

    Paper: x = `profile`; u_t = `profile(token_ids)[:, t]`. Heads draw their tables apart, so that
    tokens which collide in one head are told apart by another.
    """

    vocab_size: int
    num_heads: int
    geometry: Geometry
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("vocab_size", self.vocab_size, least=1)
        check_integer("num_heads", self.num_heads, least=1)

    def profile(self, token_ids: Tensor) -> Tensor:
        """Look the cells of tokens up: `(B, T)` -> `(B, T, H)`."""
        if token_ids.ndim != 2:
            raise ValueError(f"token_ids must be (B, T), but they are {tuple(token_ids.shape)}")
        check_index("token_ids", token_ids, self.vocab_size)
        return _hash_table(self, token_ids.device)[:, token_ids.long()].movedim(0, -1)


@lru_cache(maxsize=32)
def _hash_table(token_hash: TokenHash, device: torch.device) -> Tensor:
    # Drawn on the CPU whatever the device, so that a seed means one table everywhere.
    generator = torch.Generator().manual_seed(token_hash.seed)
    shape = (token_hash.num_heads, token_hash.vocab_size)
    return torch.randint(token_hash.geometry.num_profiles, shape, generator=generator).to(device)


def type_through_cell(geometry: Geometry, direction_index: Tensor, profile: Tensor) -> Tensor:
    """Take the hyperplane with a given direction through a query's own cell.

    >>> geometry = Geometry(vc_dim=3, field_size=5)
    >>> type_through_cell(geometry, torch.tensor([0, 1]), torch.tensor([7, 7]))
    tensor([1, 8])

    type(i) = H_(a, a . u), so a query sees every distant key whose token repeats its own. Paper:
    a = `direction_index`, u = `profile`; both broadcast.
    """
    return geometry.type_index(direction_index, geometry.offset_of(direction_index, profile))


def agreeing_direction(geometry: Geometry, cells: Tensor) -> tuple[Tensor, Tensor]:
    """Find a direction along which all given cells lie on one hyperplane: `(..., k)` -> `(...)`.

    >>> geometry = Geometry(vc_dim=3, field_size=5)
    >>> agreeing_direction(geometry, torch.tensor([[7, 11], [0, 0]]))
    (tensor([1, 0]), tensor([True, True]))
    >>> type_through_cell(geometry, torch.tensor(1), torch.tensor([7, 11]))  # one line holds both
    tensor([8, 8])

    The first direction a with a . u_1 = ... = a . u_k, and whether there is one; where there is
    none, direction 0. Up to D = d - 1 cells always lie on one hyperplane. Paper: u = `cells`.
    """
    if cells.ndim < 1 or cells.shape[-1] < 1:
        raise ValueError(f"cells must be (..., k) with k >= 1, but they are {tuple(cells.shape)}")
    check_index("cells", cells, geometry.num_profiles)
    field_size, ambient_dim = geometry.field_size, geometry.ambient_dim
    if ambient_dim == 0:
        flat = torch.zeros(cells.shape[:-1], dtype=torch.long, device=cells.device)
        return flat, torch.ones_like(flat, dtype=torch.bool)
    point = to_digits(cells, field_size, ambient_dim)
    apart = from_digits((point[..., 1:, :] - point[..., :1, :]) % field_size, field_size)
    orthogonal = (offsets(field_size, ambient_dim, cells.device) == 0).T.contiguous()
    agrees = torch.ones_like(orthogonal[cells[..., 0].long()])
    for difference in apart.unbind(-1):
        agrees &= orthogonal[difference]
    return agrees.byte().argmax(-1), agrees.any(-1)
