"""From profile states to type states and back, for tables whose rows have an order of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from smat.geometry import Geometry
from smat.geometry.radon import at_once, backproject_tables, tabulate_tables
from smat.ops.group_order import GroupOrder
from smat.ops.workspace import scratch


@dataclass(frozen=True)
class TableTransform:
    """Tabulation of a geometry, given the orders of profiles and of types: None is their own.

    >>> import torch
    >>> transform = TableTransform(Geometry(vc_dim=3, field_size=2))
    >>> table = transform.tabulate(torch.ones(1, 4, 1, 1))  # 4 points, 6 lines of 2 points each
    >>> table.flatten()
    tensor([2., 2., 2., 2., 2., 2.])
    >>> transform.backproject(table).flatten()  # 3 lines through each point
    tensor([6., 6., 6., 6.])
    """

    geometry: Geometry
    profiles: GroupOrder | None = None
    types: GroupOrder | None = None

    def tabulate(self, pooled: Tensor, out: Tensor | None = None) -> Tensor:
        """Sum profile states over hyperplanes, (N, P, r, p) -> (N, B, r, p)."""
        num_types, orders = self.geometry.num_types, (self.profiles, self.types)
        return self._run(tabulate_tables, pooled, num_types, *orders, out)

    def backproject(self, table: Tensor) -> Tensor:
        """Sum type states over the hyperplanes through a point, (N, B, r, p) -> (N, P, r, p)."""
        num_profiles, orders = self.geometry.num_profiles, (self.types, self.profiles)
        return self._run(backproject_tables, table, num_profiles, *orders)

    def _run(
        self,
        transform: Callable[..., Tensor],
        table: Tensor,
        num_answers: int,
        before: GroupOrder | None,
        after: GroupOrder | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Transform a table; the answer may lie in scratch memory, or be the table itself."""
        flat = table.flatten(2)
        if out is None and not at_once(flat):
            out = scratch("transformed", (len(table), num_answers, *table.shape[2:]), table)
        answers = transform(
            flat, self.geometry.field_size, self.geometry.ambient_dim,
            out=None if out is None else out.flatten(2),
            place=None if before is None else before.place,
            order=None if after is None else after.group,
        )  # fmt: skip
        return answers.unflatten(2, table.shape[2:])
