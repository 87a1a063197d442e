"""One token: events, write, read (Algorithm 3, lines 3-9)."""

from __future__ import annotations

import torch
from torch import Tensor

from smat.ops.entries import (
    add_to_entries,
    profile_entries,
    read_entries,
    refresh_entries,
    type_entries,
)
from smat.ops.fold import decay_factor, fold_now, spread_fold
from smat.ops.row_groups import RowGroup
from smat.ops.state import StateTables
from smat.ops.timeline import FOR_EVER, Moment
from smat.ops.tokens import Tokens


def step_token(state: StateTables, tokens: Tokens, spread: bool) -> Tensor:
    """Take in one token, (B, 1, heads, .), and answer its queries: y (B, Hq, p)."""
    for group in state.groups:
        enter(state, group)
    moments = [state.timeline.at(group.position) for group in state.groups]
    psi, v = tokens.psi[:, 0], tokens.v[:, 0]
    recent = state.own("recent")
    if tokens.log_decay is not None:
        pass_gates(state, None, tokens.log_decay[:, 0])
        recent *= tokens.log_decay[None, :, 0, :, None, None].exp().to(state.dtype)
    recent.addcmul_(psi.unsqueeze(-1), v.unsqueeze(-2))
    write_profile(state, moments, tokens)
    y = read_token(state, moments, tokens)
    for group in state.groups:
        group.position += 1
        if spread:
            spread_fold(state, group)
    leave_profiles(state)
    return y


def enter(state: StateTables, group: RowGroup) -> None:
    """Let everything happen that happens before the group's next token: folds, then open edges."""
    position = group.position
    if position < group.until or position == 0:
        return
    before, now = state.timeline.at(position - 1), state.timeline.at(position)
    for segment in range(before.segment + 1, now.segment + 1):
        fold_now(state, group, segment)
    for edge in range(before.newest + 1, now.newest + 1):
        slot = edge % state.timeline.num_slots
        rows = slice(None) if group.index is None else group.index
        state.own("recent")[slot, rows] = 0
        if "log_decay" in state.tensors:
            state.own("edge_log_decay")[slot, rows] = state.tensors["log_decay"][0, rows]
    group.until = state.timeline.next_event(position) or FOR_EVER


def leave_profiles(state: StateTables) -> None:
    """Give the profile tables up once no row will ever fold again."""
    if state.timeline.num_slots > 1 or "profile_table" not in state.tensors:
        return
    last = (max(0, group.position - 1) for group in state.groups)
    if not any(state.timeline.at(position).folds for position in last):
        state.drop("profile_table", "profile_epoch", "profile_log_decay")


def pass_gates(
    state: StateTables, group: RowGroup | None, total: Tensor, lost: Tensor | None = None
) -> None:
    """Add log-gates (n, H) to lambda of a group, or of all rows, without losing digits."""
    state.allocate("log_decay", "edge_log_decay")
    if "profile_table" in state.tensors:
        state.allocate("profile_log_decay")
    rows = slice(None) if group is None or group.index is None else group.index
    pair = state.own("log_decay")[0, rows]
    summed = pair[..., 0] + total
    rest = pair[..., 1] + (total - (summed - pair[..., 0]))
    rest = rest if lost is None else rest + lost
    state.tensors["log_decay"][0, rows] = torch.stack([summed, rest], -1)


def write_profile(state: StateTables, moments: list[Moment], tokens: Tokens) -> None:
    """Add the token's state to its profile in the newest table, if that will be folded."""
    if not any(moment.folds for moment in moments):
        return
    far, v = (tokens.psi if tokens.far is None else tokens.far)[:, 0], tokens.v[:, 0]
    if len(moments) == 1 and tokens.profile is None:
        profile = state.groups[0].position % state.mask.geometry.num_profiles
        _write_one_profile(state, moments[0].newest, profile, far, v)
        return
    rows = [
        row
        for group, moment in zip(state.groups, moments, strict=True)
        if moment.folds
        for row in group.rows
    ]
    where = torch.tensor(rows, device=state.device)
    edge = per_row(state, [moment.newest for moment in moments])
    if tokens.profile is None:
        profile_of_row = state.mask.profile(torch.tensor(state.positions, device=state.device))
        profile_index = profile_of_row[:, None].expand(-1, state.sizes.heads)
    else:
        profile_index = tokens.profile[:, 0].long()
    entry = profile_entries(state, edge[where], where, profile_index[where])
    refresh_entries(state, entry.flatten(), edge[where].repeat_interleave(entry.shape[1]))
    add_to_entries(state, entry.flatten(), far[where].flatten(0, 1), v[where].flatten(0, 1))


def _write_one_profile(state: StateTables, edge: int, profile: int, far: Tensor, v: Tensor) -> None:
    """Write where all rows and heads write to the same profile: views, nothing is gathered."""
    slot = edge % state.timeline.num_slots
    entry = state.own("profile_table")[slot, :, :, profile]
    epoch = state.own("profile_epoch")[slot, :, :, profile]
    entry.masked_fill_((epoch != edge)[..., None, None], 0)
    epoch.fill_(edge)
    if "log_decay" in state.tensors:
        last = state.own("profile_log_decay")[slot, :, :, profile]
        now = state.tensors["log_decay"][0]
        entry *= decay_factor(now - last, state.dtype)[..., None, None]
        last.copy_(now)
    entry.addcmul_(far.unsqueeze(-1), v.unsqueeze(-2))


def per_row(state: StateTables, values: list[int]) -> Tensor:
    """Spread one number for each group over the batch rows."""
    rows = [0] * len(state)
    for group, value in zip(state.groups, values, strict=True):
        for row in group.rows:
            rows[row] = value
    return torch.tensor(rows, device=state.device)


def read_token(state: StateTables, moments: list[Moment], tokens: Tokens) -> Tensor:
    """Contract every query with the recurrent state of its window and with its type's state."""
    assert tokens.phi is not None
    sizes, slots = state.sizes, state.timeline.num_slots
    phi = tokens.phi[:, 0].unflatten(1, (sizes.heads, sizes.group))  # (B, H, G, r)
    segments = [moment.segment for moment in moments]
    segment = segments[0] if len(moments) == 1 else per_row(state, segments)
    window = _of_rows(state.tensors["recent"], segment % slots)
    y = torch.bmm(phi.flatten(0, 1), window.flatten(0, 1))  # (B H, G, p)
    if any(segments):
        if "log_decay" in state.tensors:
            edge = _of_rows(state.tensors["edge_log_decay"], segment % slots)
            since = decay_factor(state.tensors["log_decay"][0] - edge, state.dtype)
            phi = phi * since[..., None, None]
        if isinstance(segment, int) and tokens.query_type is None:
            y.baddbmm_(phi.flatten(0, 1), _one_type(state, segment).flatten(0, 1))
        else:
            y += _read_types(state, segment, phi, tokens).view_as(y)
    return y.view(len(state), sizes.query_heads, -1)


def _of_rows(x: Tensor, slot: int | Tensor) -> Tensor:
    """Take a slot, or each row's own slot, of (slots, B, ...)."""
    if isinstance(slot, int):
        return x[slot]
    return x[slot, torch.arange(x.shape[1], device=x.device)]


def _one_type(state: StateTables, segment: int) -> Tensor:
    """View the states (B, H, r, p) that all heads read where all rows have the same type."""
    table = state.tensors["type_table"]
    since_anchor = state.groups[0].position - state.mask.schedule.anchor
    return table[segment % len(table)][:, :, (since_anchor + 1) % table.shape[3]]


def _read_types(state: StateTables, segment: int | Tensor, phi: Tensor, tokens: Tokens) -> Tensor:
    """Read given types, or those of rows at different positions: (B Hq, p)."""
    if tokens.query_type is None:
        of_row = state.mask.query_type(torch.tensor(state.positions, device=state.device))
        query_type = of_row[:, None].expand(-1, state.sizes.query_heads)
    else:
        query_type = tokens.query_type[:, 0]
    rows = torch.arange(len(state), device=state.device)
    entry = type_entries(state, segment, rows, query_type)
    weight = None if tokens.read_weight is None else tokens.read_weight[:, 0].flatten(0, 1)
    table = state.tensors["type_table"]
    return read_entries(table, entry.flatten(0, 1), phi.flatten(0, 2), weight)


def divide(y: Tensor, normalize: bool) -> Tensor:
    """Divide by the normaliser in the last column; a row that saw nothing gives 0."""
    if not normalize:
        return y
    total = y[..., -1:]
    return y[..., :-1] / total.masked_fill(total == 0, torch.inf)
