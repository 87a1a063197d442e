"""The order in which groups stand in a table: those with most visits first.

Groups of about one size then stand side by side, and products over them need little padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GroupOrder(NamedTuple):
    """Where every group stands, and which group stands at every place; a row at a time.

    >>> order = GroupOrder.by_visits(torch.tensor([[2, 0, 2, 2, 0]]), num_groups=3)
    >>> order.place, order.group
    (tensor([[1, 2, 0]]), tensor([[2, 0, 1]]))
    >>> order.rename(torch.tensor([[2, 0, 1]]))
    tensor([[0, 1, 2]])
    """

    place: Tensor  # (N, groups)
    group: Tensor  # (N, groups)

    @classmethod
    def by_visits(cls, index: Tensor, num_groups: int) -> GroupOrder:
        """Order the groups that tokens name, (N, ...)."""
        visits = index.flatten(1)
        count = visits.new_zeros(len(visits), num_groups)
        count.scatter_add_(1, visits, torch.ones_like(visits))
        group = count.argsort(dim=1, descending=True, stable=True)
        place = torch.empty_like(group)
        place.scatter_(1, group, torch.arange(num_groups, device=index.device).expand_as(group))
        return cls(place, group)

    def rename(self, index: Tensor) -> Tensor:
        """Name groups (N, ...) by their places."""
        return self.place.gather(1, index.flatten(1)).view(index.shape)
