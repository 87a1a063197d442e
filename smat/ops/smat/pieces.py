"""What a rank's tokens read of the ranks before them, and what they leave to those behind.

Everything decays to an edge of the share: keys to its end, where they are handed on, and states
that come in from its beginning. So only sums of gates from an edge are exponentiated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.distributed import Piece
from smat.masks import BoundarySchedule, none
from smat.ops.feature_maps import repeat_heads
from smat.ops.linear.decay import FORGETS, decay_factor
from smat.ops.smat.carried import OLDER, CarriedGroups, keys_of, readers
from smat.ops.smat.fold import settle
from smat.ops.smat.groups import (
    Groups,
    PeriodicGroups,
    SortedGroups,
    pool_groups,
    read_groups,
)
from smat.ops.smat.routing import Gates, Options, Routing
from smat.ops.smat.state import StateTables


class Carried(NamedTuple):
    """What the ranks before left at the beginning of a piece, by group."""

    schedule: BoundarySchedule
    position: int
    groups: CarriedGroups
    windows: Tensor  # (groups, B, H, r, p)
    tables: Tensor  # (groups, B, H, profiles, r, p)

    def window(self, groups: tuple[int, ...]) -> Tensor:
        """Add up the states of some groups, (B, H, r, p)."""
        return sum_of([self.windows[self.groups.windows.index(each)] for each in groups])

    def table(self, groups: tuple[int, ...]) -> Tensor:
        """Add up the tables of some groups, (B, H, profiles, r, p)."""
        return sum_of([self.tables[self.groups.tables.index(each)] for each in groups])

    def restore(self, state: StateTables) -> None:
        """Let an empty state stand where the ranks before left off."""
        with torch.no_grad():
            for group in self.groups.windows:
                later = tuple(each for each in self.groups.windows if each >= group)
                state.tensors["recent"][group % state.num_slots] = self.window(later)
            for group in self.groups.tables:
                mine = self.table((group,))
                if group == OLDER:
                    state.allocate("type_table")
                    segment = self.schedule.segment_index(self.position)
                    table = state.mask.geometry.tabulate(mine.flatten(3))
                    into = state.tensors["type_table"][segment % state.num_buffers]
                    into.copy_(table.unflatten(3, mine.shape[3:]))
                else:
                    state.allocate("profile_table")
                    state.tensors["profile_table"][group % state.num_slots] = mine
        for cohort in state.cohorts:
            cohort.position = self.position
            settle(state, cohort)


def sum_of(states: list[Tensor]) -> Tensor:
    """Add up, without a copy of a single one."""
    return states[0] if len(states) == 1 else torch.stack(states).sum(0)


def schedule_of(routing: Routing, options: Options) -> BoundarySchedule:
    """The boundary, or none where queries see all keys alike: as a state has it."""
    mask, types = options.mask, routing.query_type
    weighs = routing.write_weight is not None or routing.read_weight is not None
    weighs = weighs or (types is not None and types.ndim == 4)
    tells = weighs or options.branch != "both" or options.decay_scope != "all"
    return mask.schedule if mask.vc_dim > 1 or tells else none()


class PieceTokens:
    """The tokens of a piece in rows, a row a head of values: (B, H, t, .)."""

    def __init__(
        self, phi: Tensor, psi: Tensor, v: Tensor, gates: Gates, routing: Routing, options: Options,
        piece: Piece, goes_on: bool,
    ) -> None:  # fmt: skip
        own, self.mask, self.piece = slice(piece.start, piece.stop), options.mask, piece
        self.branch, self.goes_on = options.branch, goes_on
        self.schedule = schedule_of(routing, options)
        heads, self.geometry = v.shape[2], options.mask.geometry

        def rows(x: Any) -> Any:
            return None if x is None else repeat_heads(x[:, own], heads).transpose(1, 2)

        self.psi, self.v, self.profile = rows(psi), rows(v), rows(routing.profile)

        def asking(x: Any) -> Any:  # (B, H, G, t, ...)
            return None if x is None else x[:, own].unflatten(2, (heads, -1)).movedim(1, 3)

        self.phi = asking(repeat_heads(phi, max(heads, phi.shape[2])))
        self.types, self.weight = asking(routing.query_type), asking(routing.read_weight)
        self.far = self.psi
        if routing.write_weight is not None:
            self.far = self.psi * rows(routing.write_weight).to(psi.dtype).unsqueeze(-1)
        self.since = self.until = None  # what is left of the piece's start, and at its end
        if gates.log_decay is not None:
            wide = rows(gates.log_decay).double().clamp(min=FORGETS)
            later = F.pad(wide[..., 1:], (0, 1)).flip(-1).cumsum(-1).flip(-1)
            self.since = decay_factor(wide.cumsum(-1), psi.dtype).unsqueeze(-1)
            self.until = decay_factor(later, psi.dtype).unsqueeze(-1)
        self.tables_decay = self.since is not None and options.decay_scope == "all"

    def groups_at(self, position: int) -> CarriedGroups:
        """Group the keys before a position for those from it on; nothing at the sequence's end."""
        if position == self.piece.length:
            return CarriedGroups()
        length = self.piece.length
        return CarriedGroups.at(self.schedule, position, length, self.branch, self.goes_on)

    def states(self, groups: tuple[int, ...]) -> Tensor:
        """Sum psi v' over the own keys of every group, decayed to the end: (groups, B, H, r, p)."""
        psi = self.psi if self.until is None else self.psi * self.until
        found = []
        for group in groups:
            keys = keys_of(self.schedule, group, self.piece.offset, self.piece.end)
            found.append(psi[:, :, keys].mT @ self.v[:, :, keys])
        return torch.stack(found) if found else self._no_states()

    def tables(self, groups: tuple[int, ...]) -> Tensor:
        """Pool the own keys of every group by profile: (groups, B, H, profiles, r, p)."""
        far = self.far * self.until if self.tables_decay else self.far
        num_profiles = self.geometry.num_profiles
        found = []
        for group in groups:
            keys = keys_of(self.schedule, group, self.piece.offset, self.piece.end)
            mine, values = far[:, :, keys].flatten(0, 1), self.v[:, :, keys].flatten(0, 1)
            if keys.start == keys.stop:
                table = mine.new_zeros(len(mine), num_profiles, mine.shape[2], values.shape[2])
            else:
                table = pool_groups(mine, values, self._by_profile(keys))
            found.append(table.unflatten(0, self.v.shape[:2]))
        return torch.stack(found) if found else self._no_states().unsqueeze(3)

    def _no_states(self) -> Tensor:
        return self.psi.new_zeros(0, *self.v.shape[:2], self.psi.shape[-1], self.v.shape[-1])

    def _by_profile(self, keys: slice) -> Groups:
        num_profiles = self.geometry.num_profiles
        if self.profile is None:
            return PeriodicGroups(num_profiles, self.piece.offset + keys.start)
        return SortedGroups(self.profile[:, :, keys].flatten(0, 1).long(), num_profiles)

    def read(self, carried: Carried) -> Tensor:
        """Answer the queries by what the ranks before left: y (B, t, heads, p)."""
        answers = []
        piece = self.piece
        for reader in readers(carried.schedule, carried.groups, piece.offset, piece.end):
            phi = self.phi[:, :, :, reader.queries]
            y = phi.new_zeros(*phi.shape[:-1], self.v.shape[-1])
            since = None if self.since is None else self.since[:, :, None, reader.queries]
            if reader.windows:
                y = y + phi @ carried.window(reader.windows).unsqueeze(2)
                y = y if since is None else y * since
            if reader.tables:
                table = carried.table(reader.tables)
                types = self.geometry.tabulate(table.flatten(3)).unflatten(3, table.shape[3:])
                seen = self._read_types(phi, types.flatten(0, 1), reader.queries)
                y = y + (seen if since is None or not self.tables_decay else seen * since)
            answers.append(y)
        return torch.cat(answers, 3).flatten(1, 2).transpose(1, 2)

    def _read_types(self, phi: Tensor, table: Tensor, queries: slice) -> Tensor:
        answers = []
        for head in range(phi.shape[2]):
            weight = None
            groups: Groups
            if self.types is None:
                first = self.piece.offset + queries.start + 1 - self.mask.anchor
                groups = PeriodicGroups(self.geometry.num_types, first)
            else:
                types = self.types[:, :, head, queries].flatten(0, 1).long()
                if self.weight is not None:
                    weight = self.weight[:, :, head, queries].flatten(0, 1).to(phi.dtype)
                asked = None if weight is None else weight.detach()
                groups = SortedGroups(types, self.geometry.num_types, asked)
            answers.append(read_groups(phi[:, :, head].flatten(0, 1), table, groups, weight))
        return torch.stack(answers, 1).unflatten(0, phi.shape[:2])
