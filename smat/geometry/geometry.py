"""The finite geometry behind a mask: points for keys, hyperplanes for queries (Section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from smat.geometry import hyperplanes, radon, radon_ops
from smat.geometry.field import from_digits, is_prime, next_prime, to_digits
from smat.geometry.scaling import field_size_for


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
        if self.vc_dim < 1:
            raise ValueError(f"vc_dim must be at least 1, got {self.vc_dim}")
        if not is_prime(self.field_size):
            raise ValueError(
                f"field_size must be prime, got {self.field_size}; "
                f"the next prime is {next_prime(self.field_size)}"
            )

    @classmethod
    def for_distant(cls, num_distant: int, vc_dim: int) -> Geometry:
        """Pick the smallest prime field with q^d >= n for n distant tokens.

        >>> Geometry.for_distant(512, vc_dim=4)
        Geometry(vc_dim=4, field_size=5)
        """
        if num_distant < 0:
            raise ValueError(f"num_distant must not be negative, got {num_distant}")
        if vc_dim < 1:
            raise ValueError(f"vc_dim must be at least 1, got {vc_dim}")
        return cls(vc_dim, field_size_for(num_distant, vc_dim))

    @property
    def ambient_dim(self) -> int:
        """The number of coordinates of a point, d - 1."""
        return index(self.vc_dim) - 1  # `index`: a compiler shall not make a symbol of it

    @property
    def num_profiles(self) -> int:
        """The number of points, q^(d-1)."""
        return int(index(self.field_size) ** self.ambient_dim)

    @property
    def num_directions(self) -> int:
        """The number of parallel classes of hyperplanes; none at d = 1."""
        return hyperplanes.count_directions(index(self.field_size), self.ambient_dim)

    @property
    def num_types(self) -> int:
        """The number of hyperplanes, q (q^(d-1) - 1) / (q - 1), and 1 at d = 1."""
        return max(1, index(self.field_size) * self.num_directions)

    def points(self, device: torch.device | str | None = None) -> Tensor:
        """List the points in counting order, (P, D) long."""
        return hyperplanes.points(*self._key(device)).clone()

    def directions(self, device: torch.device | str | None = None) -> Tensor:
        """List the normalised directions, (A, D) long."""
        return hyperplanes.directions(*self._key(device)).clone()

    def incidence(self, device: torch.device | str | None = None) -> Tensor:
        """Mark the points of every hyperplane, (B, P) bool. Dense: for small geometries."""
        return hyperplanes.incidence(*self._key(device)).clone()

    def witness_types(self, device: torch.device | str | None = None) -> Tensor:
        """Number the hyperplanes that shatter the standard basis, (2^D,), by subset bit mask."""
        return hyperplanes.witness_types(*self._key(device)).clone()

    def basis_profiles(self, device: torch.device | str | None = None) -> Tensor:
        """Number the points e_1, ..., e_D, (D,)."""
        basis = torch.eye(self.ambient_dim, dtype=torch.long, device=device)
        return from_digits(basis, self.field_size)

    def profile_index(self, points: Tensor) -> Tensor:
        """Number points given by coordinates, (..., D) -> (...)."""
        if points.shape[-1] != self.ambient_dim:
            raise ValueError(
                f"a point of vc_dim {self.vc_dim} has {self.ambient_dim} coordinates, "
                f"got {points.shape[-1]}"
            )
        _check_range("a coordinate", points, self.field_size)
        return from_digits(points, self.field_size)

    def type_index(self, direction_index: Tensor, offset: Tensor) -> Tensor:
        """Number the hyperplane with a direction and an offset."""
        _check_range("direction_index", direction_index, max(1, self.num_directions))
        _check_range("offset", offset, self.field_size if self.ambient_dim else 1)
        return direction_index * self.field_size + offset

    def split_type(self, type_index: Tensor) -> tuple[Tensor, Tensor]:
        """Take a type's number apart into direction and offset."""
        _check_range("type_index", type_index, self.num_types)
        return type_index // self.field_size, type_index % self.field_size

    def offset_of(self, direction_index: Tensor, profile: Tensor) -> Tensor:
        """Find a . x mod q: which hyperplane of a parallel class a point lies on."""
        _check_range("profile", profile, self.num_profiles)
        if self.ambient_dim == 0:
            return torch.zeros_like(direction_index + profile)
        _check_range("direction_index", direction_index, self.num_directions)
        direction = hyperplanes.directions(*self._key(profile.device))[direction_index]
        point = to_digits(profile, self.field_size, self.ambient_dim)
        return (direction * point).sum(-1) % self.field_size

    def tabulate(self, table: Tensor, method: str = "factored") -> Tensor:
        """Sum profile states over every hyperplane, U = C F: (..., P, S) -> (..., B, S)."""
        _check_table(table, self.num_profiles, "profiles", self)
        radon.check_method(method)
        return radon_ops.tabulate(table, index(self.field_size), self.ambient_dim, method)

    def backproject(self, table: Tensor, method: str = "factored") -> Tensor:
        """Sum type states over a point's hyperplanes, C' U: (..., B, S) -> (..., P, S)."""
        _check_table(table, self.num_types, "types", self)
        radon.check_method(method)
        return radon_ops.backproject(table, index(self.field_size), self.ambient_dim, method)

    def tabulation_cost(self, method: str = "factored") -> int:
        """Count the state additions of one tabulation.

        >>> Geometry(vc_dim=4, field_size=23).tabulation_cost("algorithm2")
        6728351
        """
        return radon.tabulation_cost(self.field_size, self.ambient_dim, method)

    def _key(self, device: torch.device | str | None) -> tuple[int, int, torch.device]:
        return self.field_size, self.ambient_dim, torch.empty(0, device=device).device


def _check_range(name: str, value: Tensor, limit: int) -> None:
    if value.numel() and bool(((value < 0) | (value >= limit)).any()):
        raise ValueError(
            f"{name} must lie in [0, {limit}), got values from "
            f"{int(value.min())} to {int(value.max())}"
        )


def _check_table(table: Tensor, num_rows: int, rows: str, geometry: Geometry) -> None:
    if table.ndim < 2 or table.shape[-2] != num_rows:
        raise ValueError(
            f"a table over the {num_rows} {rows} of vc_dim {geometry.vc_dim}, field_size "
            f"{geometry.field_size} has shape (..., {num_rows}, S), got {tuple(table.shape)}"
        )
    if not table.dtype.is_floating_point:
        raise ValueError(f"a table must hold floating-point states, got {table.dtype}")
