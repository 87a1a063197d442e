"""Several tokens at once, from any state: the chunkwise form between two events (Algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from smat.masks import Segment
from smat.ops.causal import Arrays, CausalBranch
from smat.ops.decay import LogDecay
from smat.ops.entries import (
    add_to_entries,
    profile_entries,
    read_entries,
    refresh_entries,
    type_entries,
)
from smat.ops.fold import decay_factor, pick, spread_fold
from smat.ops.grouping import Grouping, PeriodicGroups
from smat.ops.pieces import cut_blocks
from smat.ops.row_groups import RowGroup
from smat.ops.rows import chunks_per_block
from smat.ops.sorted_groups import SortedGroups
from smat.ops.state import StateTables
from smat.ops.step import enter, leave_profiles, pass_gates
from smat.ops.timeline import Moment
from smat.ops.tokens import Tokens

OUTER_ELEMENTS = 1 << 22  # of the outer products that one share of sparse writes forms
POOL_BYTES = 24 << 20  # of one pooled table


def extend_tokens(
    state: StateTables, tokens: Tokens, lengths: list[int], spread: bool = False
) -> Tensor | None:
    """Take in the first tokens of every row; answer y (B, T, Hq, p), zeros behind each length."""
    y = None
    if tokens.phi is not None:
        y = tokens.phi.new_zeros(*tokens.phi.shape[:3], state.sizes.aug_dim)
    for group, length in state.part(lengths):
        answer = _absorb(state, group, tokens.rows(group.index, length), spread)
        if y is not None and answer is not None:
            y[slice(None) if group.index is None else group.index, :length] = answer
    state.unite()
    leave_profiles(state)
    return y


def _absorb(state: StateTables, group: RowGroup, tokens: Tokens, spread: bool) -> Tensor | None:
    """Work off a group's tokens, piece by piece between events: y (n, t, Hq, p)."""
    answers, start, length = [], 0, tokens.psi.shape[1]
    while start < length:
        enter(state, group)
        moment, event = state.timeline.at(group.position), state.timeline.next_event(group.position)
        stop = length if event is None else min(length, start + event - group.position)
        piece = _Piece(state, group, moment, tokens.between(start, stop))
        if tokens.phi is not None:
            answers.append(piece.read(tokens.phi[:, start:stop]))
        piece.write()
        group.position += stop - start
        if spread:
            spread_fold(state, group, stop - start)
        start = stop
    return torch.cat(answers, 1) if answers else None


class _Piece:
    """Tokens between two events: one window, one type table, one profile table."""

    def __init__(self, state: StateTables, group: RowGroup, moment: Moment, tokens: Tokens) -> None:
        self.state, self.group, self.moment, self.tokens = state, group, moment, tokens
        self.psi, self.v = _rows(tokens.psi), _rows(tokens.v)
        self.far = self.psi if tokens.far is None else _rows(tokens.far)
        self.length, self.decay = tokens.psi.shape[1], None
        if tokens.log_decay is not None:
            self.decay = LogDecay(_rows(tokens.log_decay))

    def read(self, phi: Tensor) -> Tensor:
        """Answer the piece's queries (n, t, Hq, r), before anything of it is written."""
        state, num_rows, sizes = self.state, len(self.psi), self.state.sizes
        slots = state.timeline.num_slots
        window = pick(state.tensors["recent"][self.moment.segment % slots], self.group)
        num_chunks = chunks_per_block(num_rows, phi.device)
        blocks = cut_blocks((Segment(0, self.length, -1),), num_chunks)
        by_key = phi.unflatten(2, (sizes.heads, sizes.group)).permute(0, 2, 3, 1, 4)
        by_key = by_key.flatten(0, 1).contiguous()  # (n H, G, t, r)
        branch = CausalBranch(
            Arrays(by_key, self.psi, self.v), self.decay, blocks, initial=window.flatten(0, 1)
        )
        y = torch.cat([part[0] for _, _, part in branch.forward()], 2)
        y = y.unflatten(0, (-1, sizes.heads)).permute(0, 3, 1, 2, 4).flatten(2, 3)
        return y + self._read_types(phi) if self.moment.segment else y

    def _read_types(self, phi: Tensor) -> Tensor:
        state, tokens, sizes = self.state, self.tokens, self.state.sizes
        query_type = tokens.query_type
        if query_type is None:
            of_token = state.mask.query_type(self._positions())
            query_type = of_token[None, :, None].expand(*phi.shape[:3])
        entry = type_entries(
            state, self.moment.segment, self._row_index(), query_type.transpose(1, 2)
        ).transpose(1, 2)
        if "log_decay" in state.tensors:
            since = self._since_edge().repeat_interleave(sizes.group, 2)
            phi = phi * since.unsqueeze(-1)
        weight = None if tokens.read_weight is None else tokens.read_weight.flatten(0, 2)
        table = state.tensors["type_table"]
        return read_entries(table, entry.flatten(0, 2), phi.flatten(0, 2), weight).view(
            *phi.shape[:3], -1
        )

    def _since_edge(self) -> Tensor:
        """What is left of the type table at every token, (n, t, H)."""
        state, slots = self.state, self.state.timeline.num_slots
        edge = pick(state.tensors["edge_log_decay"][self.moment.segment % slots], self.group)
        pair = pick(state.tensors["log_decay"][0], self.group) - edge
        if self.decay is None:
            return decay_factor(pair, state.dtype).unsqueeze(1).expand(-1, self.length, -1)
        inside = torch.stack([self.decay.total[:, 1:], self.decay.lost[:, 1:]], -1)
        by_token = inside.unflatten(0, (-1, state.sizes.heads)).transpose(1, 2)
        return decay_factor(pair.unsqueeze(1) + by_token, state.dtype)

    def write(self) -> None:
        """Add the piece to every open window, and to the newest profile table."""
        state, rows = self.state, self._rows_of_batch()
        end = None
        if self.decay is not None:
            last = self.length
            after = torch.arange(1, last + 1, device=state.device)
            end = self.decay.between(torch.full_like(after, last), after, state.dtype)
        arrived = self.psi if end is None else self.psi * end.unsqueeze(-1)
        added = torch.bmm(arrived.mT, self.v).unflatten(0, (-1, state.sizes.heads))
        recent = state.own("recent")
        if self.decay is None:
            recent[:, rows] += added
        else:
            edges = torch.tensor([self.length, 0], device=state.device)
            whole = self.decay.between(edges[0], edges[1], state.dtype)
            left = whole.view(-1, state.sizes.heads, 1, 1)
            recent[:, rows] = recent[:, rows] * left + added
            total, lost = self.decay.total[:, -1], self.decay.lost[:, -1]
            heads = (-1, state.sizes.heads)
            pass_gates(state, self.group, total.view(heads), lost.view(heads))
        if self.moment.folds:
            self._write_profiles(self.far if end is None else self.far * end.unsqueeze(-1))

    def _write_profiles(self, far: Tensor) -> None:
        """Pool keys that are brought to the piece's end, entry by entry or the table as a whole."""
        if 2 * self.length < self.state.mask.geometry.num_profiles:
            self._add_few(far)
            return
        per_row = far.unflatten(0, (-1, self.state.sizes.heads))
        values = self.v.unflatten(0, (-1, self.state.sizes.heads))
        for place, row in enumerate(self.group.rows):
            self._pool_row(place, row, per_row[place], values[place])

    def _add_few(self, far: Tensor) -> None:
        state, rows = self.state, self._row_index()
        profile = self.tokens.profile
        if profile is None:
            of_token = state.mask.profile(self._positions())
            profile = of_token[None, :, None].expand(*self.tokens.psi.shape[:3])
        edge = torch.full_like(rows, self.moment.newest)
        entry = profile_entries(state, edge, rows, profile.long().transpose(1, 2))
        entry = entry.flatten(0, 1)  # (n H, t)
        refresh_entries(state, entry.unique(), self.moment.newest)
        share = max(1, OUTER_ELEMENTS // (len(far) * far.shape[2] * self.v.shape[2]))
        for first in range(0, self.length, share):
            part = slice(first, first + share)
            add_to_entries(
                state, entry[:, part].flatten(), far[:, part].flatten(0, 1),
                self.v[:, part].flatten(0, 1),
            )  # fmt: skip

    def _pool_row(self, place: int, row: int, far: Tensor, v: Tensor) -> None:
        """Pool one batch row's keys (H, t, .) into its whole table."""
        state, edge = self.state, self.moment.newest
        slot = edge % state.timeline.num_slots
        table = state.own("profile_table")[slot, row]  # (H, P, r, p)
        epoch = state.own("profile_epoch")[slot, row]
        if "log_decay" in state.tensors:
            last = state.own("profile_log_decay")[slot, row]
            now = state.tensors["log_decay"][0, row].unsqueeze(1)
            table *= decay_factor(now - last, state.dtype)[..., None, None]
            last.copy_(now.expand_as(last))
        table.masked_fill_((epoch != edge)[..., None, None], 0)
        epoch.fill_(edge)
        keys = self._grouping(place)
        width = POOL_BYTES // (table[:, :, 0].numel() * table.element_size()) + 1
        for first in range(0, far.shape[-1], width):
            features = slice(first, first + width)
            table[:, :, features] += keys.outer_sum(far[..., features], v)

    def _grouping(self, place: int) -> Grouping:
        num_profiles = self.state.mask.geometry.num_profiles
        if self.tokens.profile is None:
            return PeriodicGroups(num_profiles, self.group.position)
        return SortedGroups(self.tokens.profile[place].long().T, num_profiles)

    def _positions(self) -> Tensor:
        first = self.group.position
        return torch.arange(first, first + self.length, device=self.state.device)

    def _rows_of_batch(self) -> slice | Tensor:
        return slice(None) if self.group.index is None else self.group.index

    def _row_index(self) -> Tensor:
        return torch.tensor(self.group.rows, device=self.state.device)


def _rows(x: Tensor) -> Tensor:
    """(n, t, H, ...) -> (n H, t, ...)."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()
