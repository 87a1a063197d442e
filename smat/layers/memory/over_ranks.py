"""The memory of a delta-rule backbone over ranks (appendix "Memory updates", GDN, cut in time).

Tables are carried by the transitions of every token, before and behind the boundary, so that a rank
reads the tables that come in with queries carried back to the beginning of its share.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from smat.distributed.exchange import gather, scan_rows, without_autocast
from smat.layers.call import CallInfo
from smat.layers.memory.transport import (
    DeltaTokens,
    TransportState,
    boundary_of,
    carry_keys,
    carry_queries,
    written_by,
)
from smat.masks import SMatMask
from smat.ops import SMatState
from smat.ops.smat.carried import OLDER, CarriedGroups
from smat.ops.smat.groups import SortedGroups, pool_groups, read_groups
from smat.ops.smat.pieces import Carried
from smat.ops.smat.routing import Routing


class CarriedTokens(NamedTuple):
    """Queries and keys (B, T, H, K) at the boundary, or at the edge of the share before it."""

    queries: Tensor
    keys: Tensor
    v: Tensor
    before: Tensor  # (B, H, K, K), the transitions of a rank's distant tokens
    behind: Tensor  # and of its recent ones


@without_autocast
def read_over_ranks(
    tokens: DeltaTokens,
    routing: Routing,
    mask: SMatMask,
    call: CallInfo,
    neighbours: Iterable[Routing] = (),
    *,
    erases: bool,
) -> tuple[Tensor, TransportState | None]:
    """Do what `read_transported` does, for the tokens of a rank: (B, T, H, V), and the state."""
    num_distant = boundary_of(mask)
    is_distant = call.positions().expand(call.batch, -1) < num_distant
    recent, distant = tokens.close(is_distant), tokens.close(~is_distant)
    if call.real is not None:
        recent, distant = recent.close(~call.real), distant.close(~call.real)
    keys = carry_keys(distant, erases)
    _, before = carry_queries(distant, erases)
    queries, behind = carry_queries(recent, erases)
    carried = CarriedTokens(queries, keys, tokens.v, before, behind)
    read, table = _read(carried, routing, mask, call)
    detached = CarriedTokens(*(x.detach() for x in carried))
    for each in neighbours:
        read = read + _read(detached, each, mask, call)[0]
    out = call.close(read.masked_fill(is_distant[..., None, None], 0).to(tokens.v.dtype))
    if not call.use_cache:
        return out, None
    return out, _state(tokens, routing, table.detach(), mask, call)


def _read(
    tokens: CarriedTokens, routing: Routing, mask: SMatMask, call: CallInfo
) -> tuple[Tensor, Tensor]:
    """Read the memory (B, T, H, V); with it comes the table at the end of the share."""
    queries, keys, v, before, behind = tokens
    assert call.share is not None
    assert routing.profile is not None
    assert routing.query_type is not None
    geometry, wide = mask.geometry, torch.promote_types(v.dtype, torch.float32)
    if routing.write_weight is not None:
        keys = keys * routing.write_weight.unsqueeze(-1)
    heads = v.shape[2]

    def rows(x: Tensor) -> Tensor:  # (B, T, H, ...) -> (B H, T, ...)
        return x.transpose(1, 2).flatten(0, 1)

    by_profile = SortedGroups(rows(routing.profile.long()), geometry.num_profiles)
    pooled = pool_groups(rows(keys.to(wide)), rows(v.to(wide)), by_profile)
    pooled = pooled.unflatten(0, (-1, heads))
    first, last = before.to(wide).unsqueeze(2), behind.to(wide).unsqueeze(2)
    (came,), link = scan_rows([(last @ pooled, last @ first)], call.share, call.rows)
    pooled = pooled + first @ came
    table = geometry.tabulate(pooled.flatten(3)).unflatten(3, pooled.shape[3:])
    weight = None if routing.read_weight is None else rows(routing.read_weight.to(wide))
    asked = None if weight is None else weight.detach()
    by_type = SortedGroups(rows(routing.query_type.long()), geometry.num_types, asked)
    seen = read_groups(rows(queries.to(wide)), table.flatten(0, 1), by_type, weight)
    return seen.unflatten(0, (-1, heads)).transpose(1, 2) + link, last @ pooled


def _state(
    tokens: DeltaTokens, routing: Routing, table: Tensor, mask: SMatMask, call: CallInfo
) -> TransportState:
    """Return the state after a rank's own tokens: tables at their end, or tokens that wait."""
    share, num_distant = call.share, boundary_of(mask)
    assert share is not None
    distant = profile = None
    if share.edges[1] <= num_distant:  # some rank ends where all tokens are still waiting
        with torch.no_grad():
            assert routing.profile is not None
            held = [gather(x, share) for x in (written_by(tokens), routing.profile)]
            distant, profile = (
                torch.nn.functional.pad(
                    x[:, : min(share.stop, num_distant)],
                    (*[0, 0] * (x.ndim - 2), 0, max(1, num_distant + 1 - share.stop)),
                )
                for x in held
            )
    if share.stop <= num_distant:
        return TransportState(distant, profile, None, None)
    state = SMatState.empty(
        mask, call.batch, tokens.v.shape[2], tokens.k.shape[3], tokens.v.shape[3],
        feature_map="identity", normalize=False, branch="long_range", weighted=True,
        dtype=table.dtype, device=call.device,
    )  # fmt: skip
    groups = CarriedGroups((), (OLDER,))
    Carried(mask.schedule, share.stop, groups, table[None], table[None]).restore(state)
    eye = torch.eye(tokens.k.shape[-1], dtype=table.dtype, device=call.device)
    return TransportState(None, None, state, eye.expand(*table.shape[:2], *eye.shape))
