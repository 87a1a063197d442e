"""Decoding with boundary-transported memories: what waits, what stands, what was multiplied.

Until the boundary, distant tokens wait: k, v, gates and profile of each. At the boundary they are
carried to it, pooled and tabulated at once; from then on the type table stands still, and only the
product of the transitions since is stepped, K x K numbers a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from smat.geometry import Geometry
from smat.layers.selectors import TypeReads
from smat.masks import SMatMask
from smat.ops.delta_rule import transport_keys, transport_queries
from smat.ops.sorted_groups import SortedGroups


@dataclass
class TransportState:
    """The state of a `TransportedMemory` after some tokens of every batch row.

    >>> mask = SMatMask(seq_len=64, vc_dim=2, chunk_size=16, field_size=7)
    >>> state = TransportState(mask, mask.geometry, torch.zeros(2, 3, 8), [0, 0])
    >>> state.select([1, 1, 0]).positions
    [0, 0, 0]

    `geometry` numbers profiles and types, `hash_input` is the state of the learned hash. The other
    tensors appear when they are needed: waiting tokens (B, n, H, .), type_table
    (B, H, types, K, V), transition (B, H, K, K). A row that has not reached the boundary has the
    identity for a transition.
    """

    mask: SMatMask
    geometry: Geometry
    hash_input: Tensor
    positions: list[int]
    waiting: dict[str, Tensor] = field(default_factory=dict)
    type_table: Tensor | None = None
    transition: Tensor | None = None

    @property
    def num_distant(self) -> int:
        """The number of distant tokens that a row has or will have."""
        return self.mask.schedule.anchor

    def select(self, rows: Tensor | Sequence[int]) -> TransportState:
        """Take batch rows, in any order and any number of times."""
        index = torch.as_tensor(rows, device=self.hash_input.device)
        table, transition = self.type_table, self.transition
        return replace(
            self,
            hash_input=self.hash_input[index],
            positions=[self.positions[row] for row in index.tolist()],
            waiting={name: x[index] for name, x in self.waiting.items()},
            type_table=None if table is None else table[index],
            transition=None if transition is None else transition[index],
        )

    def fork(self) -> TransportState:
        """Return a state that can be written to while this one stays as it is."""
        waiting = {name: x.clone() for name, x in self.waiting.items()}
        return replace(self, waiting=waiting, positions=list(self.positions))


@torch.no_grad()
def take_tokens(
    state: TransportState,
    q: Tensor,
    written: dict[str, Tensor],
    reads: TypeReads,
    lengths: Sequence[int],
) -> Tensor:
    """Take in the first tokens of each row and answer them, (B, T, H, V), 0 where nothing is read.

    `written` has k, v, beta, profile, and log_decay if there is one, (B, T, H, .). The state is
    written to. Rows that stand at the same position are worked off together.
    """
    out = torch.zeros_like(written["v"])
    if state.transition is None:
        k = written["k"]
        wide = torch.promote_types(k.dtype, torch.float32)
        eye = torch.eye(k.shape[-1], dtype=wide, device=k.device)
        state.transition = eye.repeat(len(k), k.shape[2], 1, 1)
    by_place: dict[tuple[int, int], list[int]] = {}
    for row, place in enumerate(zip(state.positions, lengths, strict=True)):
        by_place.setdefault(place, []).append(row)
    for (position, length), rows in by_place.items():
        index = torch.tensor(rows, device=q.device)
        split = min(length, max(0, state.num_distant - position))
        tokens = {name: x[index, :length] for name, x in written.items()}
        _wait(state, index, position, {name: x[:, :split] for name, x in tokens.items()})
        if length > split and state.num_distant > 0:
            recent = {name: x[:, split:] for name, x in tokens.items()}
            own = TypeReads(*(x[index, split:length] for x in reads))
            out[index, split:length] = _read(state, index, q[index, split:length], recent, own)
        for row in rows:
            state.positions[row] += length
    if min(state.positions) >= state.num_distant:
        state.waiting = {}
    return out


def _wait(state: TransportState, rows: Tensor, position: int, tokens: dict[str, Tensor]) -> None:
    """Keep distant tokens; with the last of them, build the rows' type tables."""
    stop = position + tokens["k"].shape[1]
    if stop == position:
        return
    batch = len(state.positions)
    for name, x in tokens.items():
        if name not in state.waiting:
            state.waiting[name] = x.new_zeros(batch, state.num_distant, *x.shape[2:])
        state.waiting[name][rows, position:stop] = x
    if stop == state.num_distant:
        table = build_type_table(state.geometry, {n: x[rows] for n, x in state.waiting.items()})
        if state.type_table is None:
            state.type_table = table.new_zeros(batch, *table.shape[1:])
        state.type_table = state.type_table.index_copy(0, rows, table)


def build_type_table(geometry: Geometry, distant: dict[str, Tensor]) -> Tensor:
    """Carry distant tokens to the boundary, pool and tabulate: (B, H, types, K, V)."""
    k = transport_keys(distant["k"], distant["beta"], distant.get("log_decay"))
    wide = torch.promote_types(k.dtype, torch.float32)
    key, value = (x.transpose(1, 2).flatten(0, 1).to(wide) for x in (k, distant["v"]))
    profile = distant["profile"].transpose(1, 2).flatten(0, 1)
    pooled = SortedGroups(profile, geometry.num_profiles).outer_sum(key, value)
    table = geometry.tabulate(pooled.flatten(2))
    return table.view(len(k), k.shape[2], -1, *pooled.shape[2:])


def _read(
    state: TransportState, rows: Tensor, q: Tensor, recent: dict[str, Tensor], reads: TypeReads
) -> Tensor:
    """Carry queries back to the boundary and read their types there: (R, t, H, V)."""
    assert state.transition is not None
    assert state.type_table is not None
    query, transition = transport_queries(
        q, recent["k"], recent["beta"], recent.get("log_decay"),
        initial_transition=state.transition[rows], output_final_transition=True,
    )  # fmt: skip
    assert transition is not None
    state.transition = state.transition.index_copy(0, rows, transition)
    table = state.type_table[rows].flatten(0, 1)
    asked, types, weight = (
        x.transpose(1, 2).flatten(0, 1)  # (R H, t, .)
        for x in (query.to(table.dtype), reads.query_type, reads.read_weight.to(table.dtype))
    )
    answers = SortedGroups(types, table.shape[1], weight).read(asked, table)
    by_row = answers.unflatten(0, (len(rows), -1)).transpose(1, 2)
    return by_row.to(recent["v"].dtype)
