"""Who writes where and who reads what, as groups of keys and of queries."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from smat.geometry import Geometry
from smat.masks import Segment, SMatMask
from smat.ops.group_order import GroupOrder
from smat.ops.grouping import Grouping, PeriodicGroups
from smat.ops.sorted_groups import SortedGroups


@dataclass(frozen=True)
class Routing:
    """Who writes where and who reads what, for N rows: positional unless given by content.

    Tables hold groups that were given by content in the order of their visits, each row in its own.
    """

    mask: SMatMask
    segments: tuple[Segment, ...]
    profile: Tensor | None = None  # (N, T)
    query_type: Tensor | None = None  # (N, G, R), or (N, G, R, k) for k reads a query
    read_weight: Tensor | None = None  # (N, G, R, k)
    positions: Tensor | None = None  # (R,), sorted: the queries that there are

    @property
    def geometry(self) -> Geometry:
        """The geometry whose points and hyperplanes the routing names."""
        return self.mask.geometry

    def folds(self) -> list[Segment]:
        """The segments with distant keys; each begins with a fold."""
        return [segment for segment in self.segments if segment.boundary > 0]

    @property
    def num_distant(self) -> int:
        """The number of keys that are distant for some query."""
        return self.segments[-1].boundary

    @cached_property
    def profile_order(self) -> GroupOrder | None:
        """The order of profiles in a table, unless it is their own."""
        if self.profile is None:
            return None
        distant = self.profile[:, : self.num_distant]
        return GroupOrder.by_visits(distant, self.geometry.num_profiles)

    @cached_property
    def type_order(self) -> GroupOrder | None:
        """The order of types in a table, unless it is their own."""
        if self.query_type is None:
            return None
        return GroupOrder.by_visits(self.query_type, self.geometry.num_types)

    def keys(self, start: int, stop: int) -> Grouping:
        """Group the keys of a range by profile."""
        num_profiles = self.geometry.num_profiles
        if self.profile is None or self.profile_order is None:
            return PeriodicGroups(num_profiles, start)
        profile = self.profile_order.rename(self.profile[:, start:stop])
        return SortedGroups(profile, num_profiles)

    def taken(self, segment: Segment) -> slice:
        """Say which of the queries belong to a segment."""
        if self.positions is None:
            return slice(segment.start, segment.stop)
        edges = torch.tensor([segment.start, segment.stop], device=self.positions.device)
        return slice(*torch.searchsorted(self.positions, edges).tolist())

    def at(self, segment: Segment, device: torch.device) -> Tensor:
        """Return the positions of a segment's queries."""
        if self.positions is None:
            return torch.arange(segment.start, segment.stop, device=device)
        return self.positions[self.taken(segment)]

    def queries(self, segment: Segment, head: int, num_rows: int) -> Grouping:
        """Group a segment's queries by type, one head of the group at a time."""
        num_types = self.geometry.num_types
        if self.query_type is not None and self.type_order is not None:
            taken, weight = self.taken(segment), None
            if self.read_weight is not None:
                weight = self.read_weight[:, head, taken]
            query_type = self.type_order.rename(self.query_type[:, head, taken])
            return SortedGroups(query_type, num_types, weight)
        if self.positions is None:
            return PeriodicGroups(num_types, segment.start + 1 - self.mask.schedule.anchor)
        index = self.mask.query_type(self.positions[self.taken(segment)])
        return SortedGroups(index.expand(num_rows, -1), num_types)
