"""The finite geometry behind a mask: points for keys, hyperplanes for queries (Section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import index

import torch
from torch import Tensor

from smat.geometry import field, radon
from smat.geometry.field import check_index, check_integer, is_prime, next_prime, to_digits


@dataclass(frozen=True)
class Geometry:
    """The affine space F_q^(d-1) with all its hyperplanes.

    >>> geometry = Geometry(vc_dim=3, field_size=5)
    >>> geometry.num_profiles, geometry.num_types, geometry.num_directions
    (25, 30, 6)
    >>> table = torch.ones(geometry.num_profiles, 2)
    >>> geometry.tabulate(table)[0]  # a line of F_5^2 holds five points
    tensor([5., 5.])

    Profiles are points numbered in base q, most significant digit first. A type is a direction
    a, whose leading nonzero coordinate is 1, with an offset b; it stands for the hyperplane
    ``{x : a . x = b}`` and has the number ``direction_index * q + offset``. At ``vc_dim=1`` the
    space is one point on one hyperplane, and q means nothing.

    Paper: d -> vc_dim, q -> field_size, D = d - 1 -> ambient_dim, P -> num_profiles,
    B -> num_types, C -> incidence.
    """

    vc_dim: int
    field_size: int

    def __post_init__(self) -> None:
        q = check_integer("field_size, a prime,", self.field_size, least=2)
        object.__setattr__(self, "vc_dim", check_integer("vc_dim", self.vc_dim, least=1))
        object.__setattr__(self, "field_size", q)
        if not is_prime(q):
            raise ValueError(f"field_size must be prime, got {q}; next is {next_prime(q)}")
        _ = self.ambient_dim, self.num_profiles, self.num_types  # a compiler finds them written

    @classmethod
    def for_distant(cls, num_distant: int, vc_dim: int) -> Geometry:
        """Pick the smallest prime field with q^d >= n for n distant tokens.

        >>> Geometry.for_distant(5**4, vc_dim=4), Geometry.for_distant(5**4 + 1, vc_dim=4)
        (Geometry(vc_dim=4, field_size=5), Geometry(vc_dim=4, field_size=7))
        """
        check_integer("num_distant", num_distant, least=0)
        if check_integer("vc_dim", vc_dim, least=1) == 1:
            return cls(1, 2)
        # A floating-point root may fall on the wrong side of a perfect power: integers decide.
        field_size = next_prime(round(num_distant ** (1.0 / vc_dim)) - 2)
        while field_size**vc_dim < num_distant:
            field_size = next_prime(field_size + 1)
        return cls(vc_dim, field_size)

    @cached_property
    def ambient_dim(self) -> int:
        """The number of coordinates of a point, d - 1."""
        return index(self.vc_dim) - 1  # `index`: a compiler shall not make a symbol of it

    @cached_property
    def num_profiles(self) -> int:
        """The number of points, q^(d-1)."""
        return int(index(self.field_size) ** self.ambient_dim)

    @cached_property
    def num_directions(self) -> int:
        """The number of parallel classes of hyperplanes; none at d = 1."""
        return field.count_directions(index(self.field_size), self.ambient_dim)

    @cached_property
    def num_types(self) -> int:
        """The number of hyperplanes, q (q^(d-1) - 1) / (q - 1), and 1 at d = 1."""
        return max(1, index(self.field_size) * self.num_directions)

    def points(self, device: torch.device | str | None = None) -> Tensor:
        """List the points in counting order, (P, D) long."""
        return field.points(*self._key(device)).clone()

    def directions(self, device: torch.device | str | None = None) -> Tensor:
        """List the normalised directions, (A, D) long."""
        return field.directions(*self._key(device)).clone()

    def incidence(self, device: torch.device | str | None = None) -> Tensor:
        """Mark the points of every hyperplane, (B, P) bool. Dense: for small geometries."""
        return field.incidence(*self._key(device)).clone()

    def basis_profiles(self, device: torch.device | str | None = None) -> Tensor:
        """Number the points e_1, ..., e_D, (D,)."""
        return self.field_size ** torch.arange(self.ambient_dim - 1, -1, -1, device=device)

    def type_index(self, direction_index: Tensor, offset: Tensor) -> Tensor:
        """Number the hyperplane with a direction and an offset."""
        check_index("direction_index", direction_index, max(1, self.num_directions))
        check_index("offset", offset, self.field_size if self.ambient_dim else 1)
        return direction_index.long() * self.field_size + offset.long()

    def offset_of(self, direction_index: Tensor, profile: Tensor) -> Tensor:
        """Find a . x mod q: which hyperplane of a parallel class a point lies on."""
        check_index("profile", profile, self.num_profiles)
        if self.ambient_dim == 0:
            return torch.zeros_like(direction_index.long() + profile.long())
        check_index("direction_index", direction_index, self.num_directions)
        direction = field.directions(*self._key(profile.device))[direction_index.long()]
        point = to_digits(profile, self.field_size, self.ambient_dim)
        return (direction * point).sum(-1) % self.field_size

    def tabulate(self, table: Tensor, method: str = "factored") -> Tensor:
        """Sum profile states over every hyperplane, U = C F: (..., P, S) -> (..., B, S)."""
        return self._transform(table, self.num_profiles, method, adjoint=False)

    def backproject(self, table: Tensor, method: str = "factored") -> Tensor:
        """Sum type states over a point's hyperplanes, C' U: (..., B, S) -> (..., P, S)."""
        return self._transform(table, self.num_types, method, adjoint=True)

    def tabulation_cost(self, method: str = "factored") -> int:
        """Count the state additions of one tabulation (a sum of k states counts k).

        >>> geometry = Geometry(vc_dim=4, field_size=23)
        >>> geometry.tabulation_cost("algorithm2"), geometry.tabulation_cost()
        (6728351, 584545)
        """
        _check_method(method)
        if method != "factored" or self.ambient_dim == 0:
            num_rows = self.num_types if method == "dense" else max(1, self.num_directions)
            return num_rows * self.num_profiles
        dims = range(2, self.vc_dim)  # a problem each; on a line there is nothing to add
        return sum((dim - 1) * self.field_size ** (dim + 1) + self.field_size**dim for dim in dims)

    def _key(self, device: torch.device | str | None) -> tuple[int, int, torch.device]:
        return self.field_size, self.ambient_dim, torch.empty(0, device=device).device

    def _transform(self, table: Tensor, num_entries: int, method: str, adjoint: bool) -> Tensor:
        if table.ndim < 2 or table.shape[-2] != num_entries:
            entries = "types" if adjoint else "profiles"
            expected = f"(..., {num_entries}, S) for the {num_entries} {entries} of {self}"
            raise ValueError(f"a table has shape {expected}, got {tuple(table.shape)}")
        if not table.dtype.is_floating_point:
            raise ValueError(f"a table must hold floating-point states, got {table.dtype}")
        _check_method(method)
        return radon.transform(table, index(self.field_size), self.ambient_dim, method, adjoint)


def _check_method(method: str) -> None:
    if method not in radon.METHODS:
        raise ValueError(f"method must be one of {', '.join(radon.METHODS)}, got {method!r}")
