"""SMat-Attention over ranks: own tiles, and what the ranks before left (Algorithm 1, cut in time).

A rank's queries see three kinds of keys: its own, of which the operator takes care under the mask
of these tokens alone; recent ones of ranks before, through the states of the windows that are open;
distant ones of ranks before, through tables of profiles. States and tables are sums over keys that
decay alike, so that one scan over ranks brings each rank what all before it wrote (`exchange.scan`),
and the adjoint of the scan takes their gradients back.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.distributed.exchange import Carry, scan
from smat.distributed.shares import Piece, Share
from smat.masks import BoundarySchedule, SMatMask, none
from smat.masks.boundary import ShiftedBoundary
from smat.ops.feature_maps import repeat_heads
from smat.ops.linear.decay import FORGETS, decay_factor
from smat.ops.smat.at_rows import map_features
from smat.ops.smat.carried import OLDER, CarriedGroups, keys_of, merge_groups, readers
from smat.ops.smat.fold import settle
from smat.ops.smat.groups import (
    Groups,
    PeriodicGroups,
    SortedGroups,
    pool_groups,
    read_groups,
)
from smat.ops.smat.operator import run_operator
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
        return self.windows[[self.groups.windows.index(each) for each in groups]].sum(0)

    def table(self, groups: tuple[int, ...]) -> Tensor:
        """Add up the tables of some groups, (B, H, profiles, r, p)."""
        return self.tables[[self.groups.tables.index(each) for each in groups]].sum(0)

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


def _schedule(routing: Routing, options: Options) -> BoundarySchedule:
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
        self.schedule, self.branch, self.goes_on = (
            _schedule(routing, options),
            options.branch,
            goes_on,
        )
        heads, self.geometry = v.shape[2], options.mask.geometry
        self.num_heads = max(heads, phi.shape[2])

        def rows(x: Any) -> Any:
            return None if x is None else repeat_heads(x[:, own], heads).transpose(1, 2)

        self.psi, self.v, self.profile = rows(psi), rows(v), rows(routing.profile)
        asking = (repeat_heads(phi, self.num_heads), routing.query_type, routing.read_weight)
        self.phi, self.types, self.weight = (
            x if x is None else x[:, own].unflatten(2, (heads, -1)).movedim(1, 3) for x in asking
        )  # (B, H, G, t, ...)
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
        found = [self._zeros()] if not groups else []
        for group in groups:
            keys = keys_of(self.schedule, group, self.piece.offset, self.piece.end)
            found.append(psi[:, :, keys].mT @ self.v[:, :, keys])
        return torch.stack(found)[: len(groups)]

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
        if not found:
            return self._zeros().unsqueeze(2).unsqueeze(0)[:0]
        return torch.stack(found)

    def _zeros(self) -> Tensor:
        return self.psi.new_zeros(*self.v.shape[:2], self.psi.shape[-1], self.v.shape[-1])

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
                y = y + (seen * since if self.tables_decay else seen)
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


def check_share(
    share: Share, padding: object, cu_seqlens: Tensor | None, keeps_state: bool
) -> None:
    """Refuse what a sequence over ranks cannot have."""
    if padding is not None:
        raise ValueError(f"{share.size} ranks hold one sequence: pack rows instead of padding them")
    if cu_seqlens is not None and keeps_state:
        raise ValueError("packed sequences over ranks leave no state to decode from")


def attend_over_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    routing: Routing,
    cu_seqlens: Tensor | None,
    options: Options,
    share: Share,
    goes_on: bool = False,
) -> tuple[Tensor, Carried]:
    """Attend from a rank's own tokens to those of all ranks: out (B, T, H, V), and what came in.

    The tensors of the operator, on every rank its own; ``cu_seqlens`` counts the tokens of all.
    ``goes_on`` says that a state is wanted, for queries behind the sequence.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    types, weight = routing.query_type, routing.read_weight
    if types is not None and types.ndim == 3 and weight is not None:
        routing = routing._replace(query_type=types.unsqueeze(-1), read_weight=weight.unsqueeze(-1))
    phi, psi = (map_features(options.feature_map, x.to(wide)) for x in (q, k))
    if gates.key_gate is not None:
        psi = psi * gates.key_gate.to(wide).unsqueeze(-1)
    values = F.pad(v.to(wide), (0, 1), value=1.0) if options.normalize else v.to(wide)
    inputs = (phi, psi, values, gates._replace(key_gate=None), routing)
    inside = options._replace(feature_map="identity", normalize=False)
    pieces = share.pieces(None if cu_seqlens is None else cu_seqlens.tolist())

    def alone(piece: Piece) -> Options:
        """Return the options of a piece's whole sequence, which has a mask of its own if packed."""
        mask = options.mask if cu_seqlens is None else options.mask.for_length(piece.length)
        return inside._replace(mask=mask)

    answers = []
    for is_whole, some in _runs(pieces):
        if is_whole and cu_seqlens is not None:
            answers.append(_attend_inside(*inputs, inside, some, packed=True))
        else:
            own = alone(some[0])
            own = own._replace(mask=_own_mask(own.mask, some[0]))
            answers.append(_attend_inside(*inputs, own, some))
    y = torch.cat(answers, 1)
    first = last = PieceTokens(*inputs, alone(pieces[0]), pieces[0], goes_on)
    if len(pieces) > 1:
        last = PieceTokens(*inputs, alone(pieces[-1]), pieces[-1], goes_on)
    carried, link = _scan(first, last, share, y)
    if carried.groups.windows or carried.groups.tables:
        edge = pieces[0].stop
        y = torch.cat([y[:, :edge] + first.read(carried), y[:, edge:]], 1)
    y = y + link
    if not options.normalize:
        return y, carried
    total = y[..., -1:]
    nothing = total.abs() < torch.finfo(wide).tiny
    return y[..., :-1] / total.masked_fill(nothing, 1) * ~nothing, carried


def _runs(pieces: list[Piece]) -> list[tuple[bool, list[Piece]]]:
    """Put whole sequences that stand together into one call."""
    runs = itertools.groupby(enumerate(pieces), key=lambda x: -1 if x[1].is_whole else x[0])
    return [(number < 0, [piece for _, piece in run]) for number, run in runs]


def _attend_inside(
    phi: Tensor, psi: Tensor, v: Tensor, gates: Gates, routing: Routing, options: Options,
    pieces: list[Piece], packed: bool = False,
) -> Tensor:  # fmt: skip
    """Attend to the own keys of one piece, or of packed sequences: y (B, t, H, p)."""
    own, edges = slice(pieces[0].start, pieces[-1].stop), None
    if packed:
        starts = [piece.start - own.start for piece in pieces]
        edges = torch.tensor([*starts, own.stop - own.start], device=v.device)
    gates = Gates(*(x if x is None else x[:, own] for x in gates))
    routing = Routing(*(x if x is None else x[:, own] for x in routing))
    tokens = (x[:, own] for x in (phi, psi, v))
    return run_operator(*tokens, gates, routing, None, edges, options)


def _own_mask(mask: SMatMask, piece: Piece) -> SMatMask:
    """Return the mask of a piece's tokens among themselves."""
    if piece.offset == 0:
        return mask
    recipe = (mask.vc_dim, mask.chunk_size, mask.geometry.field_size)
    schedule = ShiftedBoundary(mask.schedule, piece.offset)
    return SMatMask(max(1, mask.seq_len - piece.offset), *recipe, schedule, _derived=True)


def _scan(
    first: PieceTokens, last: PieceTokens, share: Share, anchor: Tensor
) -> tuple[Carried, Tensor]:
    """Bring in what the ranks before left of the first piece, hand on what the last one leaves."""
    before, behind = first.groups_at(first.piece.offset), last.groups_at(last.piece.end)
    next_edge = last.schedule.segment_index(last.piece.end)
    written = last.states(behind.windows), last.tables(behind.tables)
    left = None if last.since is None else last.since[:, :, -1:]  # (B, H, 1, 1)
    steps = (left, left.unsqueeze(2) if left is not None and last.tables_decay else None)
    state = (*first.v.shape[:2], first.psi.shape[-1], first.v.shape[-1])
    table = (*state[:2], first.geometry.num_profiles, *state[2:])
    kinds = []
    for x, step, came, goes, shape in zip(
        written, steps, before, behind, (state, table), strict=True
    ):
        merge = merge_groups(came, goes, next_edge).to(x.device) if first is last else None
        kinds.append(Carry(x, step, merge, (len(came), *shape)))
    found, link = scan(kinds, share, anchor)
    return Carried(first.schedule, first.piece.offset, before, *found), link
