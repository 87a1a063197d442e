"""Several tokens at once, from any state: the chunkwise form between two events (Algorithm 1)."""

from __future__ import annotations

import torch
from torch import Tensor

from smat.masks import Segment
from smat.ops.linear.causal import causal
from smat.ops.linear.decay import LogDecay, decay_factor
from smat.ops.smat.cohorts import Cohort, gather_cohorts
from smat.ops.smat.fold import enter, spread_fold
from smat.ops.smat.groups import Groups, PeriodicGroups, SortedGroups
from smat.ops.smat.state import StateTables
from smat.ops.smat.step import Tokens, pass_gates, read_entries, type_entries, write_entries

OUTER_ELEMENTS = 1 << 22  # of the outer products that some sparse writes form at a time


def extend_tokens(
    state: StateTables, tokens: Tokens, lengths: list[int], spread: bool = False
) -> Tensor | None:
    """Take in the first tokens of every row; answer y (B, T, Hq, p), zeros behind each length."""
    y = None
    if tokens.phi is not None:
        y = tokens.phi.new_zeros(*tokens.phi.shape[:3], state.spec.aug_dim)
    state.cohorts = [part for each in state.cohorts for part in _split(each, lengths, state.device)]
    for cohort in state.cohorts:
        mine = tokens.each(lambda x, some=cohort: some.pick(x)[:, : lengths[some.rows[0]]])  # type: ignore[misc]
        answer = _absorb(state, cohort, mine, spread)
        if y is not None and answer is not None:
            y[cohort.where, : answer.shape[1]] = answer
    if len(state.cohorts) > 1:
        state.cohorts = gather_cohorts(state.positions, state.built, state.device)
    return y


def _split(cohort: Cohort, lengths: list[int], device: torch.device) -> list[Cohort]:
    """Take a cohort apart so that the rows of each go on by the same number of tokens."""
    own = sorted({lengths[row] for row in cohort.rows})
    if len(own) == 1:
        return [cohort]
    by_length = [[row for row in cohort.rows if lengths[row] == length] for length in own]
    return [
        Cohort(rows, torch.tensor(rows, device=device), cohort.position, cohort.built)
        for rows in by_length
    ]


def _absorb(state: StateTables, cohort: Cohort, tokens: Tokens, spread: bool) -> Tensor | None:
    """Work off a cohort's tokens, those between two events at a time: y (n, t, Hq, p)."""
    answers, start, length = [], 0, tokens.psi.shape[1]
    while start < length:
        if cohort.position >= cohort.quiet_until:
            enter(state, cohort)
        stop = min(length, start + cohort.quiet_until - cohort.position)
        some = tokens.each(lambda x, at=start, end=stop: x[:, at:end])  # type: ignore[misc]
        quiet = QuietTokens(state, cohort, some)
        if some.phi is not None:
            answers.append(quiet.read(some.phi))
        quiet.write()
        cohort.position += stop - start
        if spread:
            spread_fold(state, cohort, stop - start)
        start = stop
    return torch.cat(answers, 1) if answers else None


class QuietTokens:
    """Tokens of a cohort between two events: one window, one type table, one profile table."""

    def __init__(self, state: StateTables, cohort: Cohort, tokens: Tokens) -> None:
        self.state, self.cohort, self.tokens = state, cohort, tokens
        self.length = tokens.psi.shape[1]
        self.segment = cohort.segment
        self.psi, self.v = _heads_first(tokens.psi), _heads_first(tokens.v)  # (n, H, t, .)
        self.decay = None
        if tokens.log_decay is not None:
            self.decay = LogDecay.of(tokens.log_decay.transpose(1, 2))

    def read(self, phi: Tensor) -> Tensor:
        """Answer the queries (n, t, Hq, r), before any of the tokens is written."""
        state, spec = self.state, self.state.spec
        slot = self.segment % state.num_slots
        window = self.cohort.pick(state.tensors["recent"][slot]).flatten(0, 1).unsqueeze(1)
        by_key = phi.unflatten(2, (spec.heads, spec.group)).permute(0, 2, 3, 1, 4)
        decay = self.decay and LogDecay(*(x.flatten(0, 1).unsqueeze(1) for x in self.decay))
        y = causal(
            by_key.flatten(0, 1).contiguous(), self.psi.flatten(0, 1),
            self.v.flatten(0, 1).unsqueeze(1), decay, (Segment(0, self.length, 0),), window,
        )  # fmt: skip
        y = y.unflatten(0, (-1, spec.heads)).flatten(1, 2).transpose(1, 2)
        if spec.branch == "long_range":
            y = torch.zeros_like(y)
        return y + self._read_types(phi) if self.segment and state.has_tables else y

    def _read_types(self, phi: Tensor) -> Tensor:
        state, tokens = self.state, self.tokens
        query_type = tokens.query_type
        if query_type is None:
            query_type = state.mask.query_type(self._positions())[None, :, None].expand(
                phi.shape[:3]
            )
        rows = torch.tensor(self.cohort.rows, device=state.device)
        buffer = self.segment % state.num_buffers
        by_head = query_type.transpose(1, 2)  # (n, Hq, t, ...)
        entry = type_entries(state, buffer, rows, by_head).transpose(1, 2)
        if "edge_log_decay" in state.tensors:
            since = self._since_edge().repeat_interleave(state.spec.group, 2)
            phi = phi * since.unsqueeze(-1)
        weight = None if tokens.read_weight is None else tokens.read_weight.flatten(0, 2)
        table = state.tensors["type_table"]
        seen = read_entries(table, entry.flatten(0, 2), phi.flatten(0, 2), weight)
        return seen.view(*phi.shape[:3], -1)

    def _since_edge(self) -> Tensor:
        """What is left of the type table at every token, (n, t, H)."""
        state, slot = self.state, self.segment % self.state.num_slots
        edge = self.cohort.pick(state.tensors["edge_log_decay"][slot])
        pair = self.cohort.pick(state.tensors["log_decay"][0]) - edge
        before = pair.sum(-1).unsqueeze(1)
        if self.decay is None:
            return decay_factor(before, state.dtype).expand(-1, self.length, -1)
        inside = (self.decay.total[..., 1:] + self.decay.lost[..., 1:]).transpose(1, 2)
        return decay_factor(before + inside, state.dtype)

    def write(self) -> None:
        """Add the tokens to every open window, and to the newest profile table."""
        state, rows = self.state, self.cohort.where
        recent = state.own("recent")
        arrived, far = self.psi, _heads_first(self.tokens.far)
        if self.decay is not None:
            end = self.decay.between(slice(-1, None), slice(1, None), state.dtype).unsqueeze(-1)
            arrived = arrived * end
            far = far * end if state.spec.decay_scope == "all" else far
            left = self.decay.between(-1, 0, state.dtype)[..., None, None]
            recent[:, rows] = recent[:, rows] * left
            pass_gates(state, self.cohort, *(x[..., -1] for x in self.decay))
        recent[:, rows] += torch.matmul(arrived.mT, self.v)
        if self.cohort.is_folded:
            self._pool(far)

    def _pool(self, far: Tensor) -> None:
        """Pool keys that are brought to the end, entry by entry or a row's whole table."""
        state = self.state
        if 2 * self.length < state.num_profiles:
            self._add_few(far)
            return
        slot, now = self.cohort.newest % state.num_slots, state.tensors.get("log_decay")
        for place, row in enumerate(self.cohort.rows):
            table = state.own("profile_table")[slot, row]  # (H, profiles, r, p)
            if now is not None and "profile_log_decay" in state.tensors:
                last = state.own("profile_log_decay")[slot, row]
                pair = now[0, row].unsqueeze(1)
                table *= decay_factor((pair - last).sum(-1), state.dtype)[..., None, None]
                last.copy_(pair.expand_as(last))
            self._by_profile(place).pool(far[place], self.v[place], table)

    def _by_profile(self, place: int) -> Groups:
        num_profiles = self.state.num_profiles
        if self.tokens.profile is None:
            return PeriodicGroups(num_profiles, self.cohort.position)
        return SortedGroups(self.tokens.profile[place].T, num_profiles)

    def _add_few(self, far: Tensor) -> None:
        state, profile = self.state, self.tokens.profile
        _, batch, heads, num_profiles = state.tensors["profile_table"].shape[:4]
        if profile is None:
            positions = state.mask.profile(self._positions())
            profile = positions[None, :, None].expand(self.tokens.psi.shape[:3])
        rows = torch.tensor(self.cohort.rows, device=state.device)
        head = rows[:, None] * heads + torch.arange(heads, device=state.device)
        head = head + self.cohort.newest % state.num_slots * batch * heads
        entry = head.unsqueeze(-1) * num_profiles + profile.transpose(1, 2)  # (n, H, t)
        at_once = max(1, OUTER_ELEMENTS // (far.shape[0] * heads * far.shape[3] * self.v.shape[3]))
        for first in range(0, self.length, at_once):
            some = (slice(None), slice(None), slice(first, first + at_once))
            write_entries(
                state, entry[some].flatten(), far[some].flatten(0, 2), self.v[some].flatten(0, 2)
            )

    def _positions(self) -> Tensor:
        first = self.cohort.position
        return torch.arange(first, first + self.length, device=self.state.device)


def _heads_first(x: Tensor) -> Tensor:
    """(n, t, H, ...) -> (n, H, t, ...), laid out anew."""
    return x.transpose(1, 2).contiguous()
