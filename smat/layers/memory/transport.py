"""What a delta-rule backbone reads of its memory (appendix "Memory updates", GDN).

Every profile undergoes the backbone's transitions, and only the chosen one receives the payload,

    F_x <- A_j F_x + 1{x_j = x} omega_j beta_j k_j v_j',      A_j = a_j (I - beta_j k_j k_j').

All profiles share the transitions, so keys are carried to the boundary n and pooled additively,
and queries are carried back to it: O(T) work, never a product of matrices a token. At the boundary
it is SMat-Attention between carried queries and carried keys, to which recent tokens add nothing.
A memory that keeps what was written (`erases` False) has A_j = I: nothing needs to be carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.layers.call import CallInfo, attend_after, attend_from_start
from smat.masks import SMatMask
from smat.masks.boundary import KeptBoundary
from smat.ops import SMatState
from smat.ops.delta_rule import transport_keys, transport_queries
from smat.ops.smat.routing import Routing


class DeltaTokens(NamedTuple):
    """What the gated delta rule takes."""

    q: Tensor  # (B, T, H, K), unit length
    k: Tensor  # (B, T, H, K), unit length
    v: Tensor  # (B, T, H, V)
    beta: Tensor  # (B, T, H)
    log_decay: Tensor | None  # (B, T, H)

    def cut(self, time: slice) -> DeltaTokens:
        """Take a range of time."""
        return DeltaTokens._make(x if x is None else x[:, time] for x in self)

    def close(self, shut: Tensor) -> DeltaTokens:
        """Close the gates of some tokens (B, T), so that they change no state."""
        shut, log_decay = shut.unsqueeze(-1), self.log_decay
        if log_decay is not None:
            log_decay = log_decay.masked_fill(shut, 0)
        return self._replace(beta=self.beta.masked_fill(shut, 0), log_decay=log_decay)


class TransportState(NamedTuple):
    """What decoding carries: distant tokens, tables, and the transitions since the boundary.

    Until it reads, a row waits with its distant tokens. Then they are carried to the boundary at
    once, into the state of an SMat-Attention whose recent keys are all zero.
    """

    distant: Tensor | None  # (B, n + 1, H, K + V + 2), zeros where none came yet: `_written`
    profile: Tensor | None  # (B, n + 1, H), theirs; both None once all rows have read
    tables: SMatState | None  # None until a row has
    transition: Tensor | None  # (B, H, K, K), the product of the recent A_t


def boundary_of(mask: SMatMask) -> int:
    """Return n, which must never move: a fold would have to carry the whole type table."""
    if not isinstance(mask.boundary, KeptBoundary):
        raise ValueError(f"the delta rule needs a kept boundary, got {mask.describe()}")
    return mask.boundary.num_distant


def read_transported(
    tokens: DeltaTokens,
    routing: Routing,
    mask: SMatMask,
    call: CallInfo,
    neighbours: Sequence[Routing] = (),
    *,
    erases: bool,
) -> tuple[Tensor, TransportState | None]:
    """Return what the tokens of a call read of the distant ones, (B, T, H, V), and the state.

    z_t = lambda_t q-bar_t' sum_h R_th U_h with U = C F at the boundary, F_x the sum of k-bar_j v_j'
    over the tokens of profile x; q-bar has the scale K^-1/2. ``call.before("memory")`` is the state
    before them, after which there is no gradient. The hash learns from `neighbours` too.

    Paper: k-bar, q-bar = what `transport_keys` and `transport_queries` return, a = exp `log_decay`.
    """
    num_distant, past = boundary_of(mask), call.before("memory")
    if num_distant == 0:
        return torch.zeros_like(tokens.v), None
    if call.real is not None:
        tokens = tokens.close(~call.real)
    if past is not None:
        with torch.no_grad():
            return _decode(tokens, routing, mask, call, past, erases)
    out, tables, transition = torch.zeros_like(tokens.v), None, None
    if num_distant < call.length:
        queries, transition = carry_queries(tokens.cut(slice(num_distant, None)), erases)
        keys = carry_keys(tokens.cut(slice(num_distant)), erases)
        queries = F.pad(queries, (0, 0, 0, 0, num_distant, 0))
        keys = F.pad(keys, (0, 0, 0, 0, 0, call.length - num_distant))
        given = (queries, keys, tokens.v, mask, replace(call, real=None))  # padding is closed
        read, tables = attend_from_start(
            *given, call.use_cache, branch="long_range", neighbours=neighbours, **routing._asdict()
        )
        out = call.close(read)
    if not call.use_cache:
        return out, None
    distant = profile = None
    if bool((call.num_tokens <= num_distant).any()):
        new = written_by(tokens)
        distant = _wait(new.new_zeros(call.batch, num_distant + 1, *new.shape[2:]), new, call)
        profile = torch.zeros(distant.shape[:3], dtype=torch.long, device=call.device)
        profile = _wait(profile, routing.profile, call)
    return out, TransportState(distant, profile, tables, transition)


def carry_keys(tokens: DeltaTokens, erases: bool) -> Tensor:
    """Carry what tokens write, beta k, to the end of the last one."""
    if not erases:
        return tokens.k * tokens.beta.unsqueeze(-1).to(tokens.k.dtype)
    return transport_keys(tokens.k, tokens.beta, tokens.log_decay)


def carry_queries(
    tokens: DeltaTokens, erases: bool, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Carry queries, times K^-1/2, back to the first token and past the transitions `before` it.

    With them comes the product of all transitions (B, H, K, K).
    """
    q, k, _, beta, log_decay = tokens
    if not erases:
        batch, _, heads, width = k.shape
        eye = torch.eye(width, dtype=k.dtype, device=k.device)
        return q * width**-0.5, eye.expand(batch, heads, width, width)
    queries, product = transport_queries(
        q, k, beta, log_decay, initial_transition=before, output_final_transition=True
    )
    assert product is not None
    return queries, product


def _decode(
    tokens: DeltaTokens,
    routing: Routing,
    mask: SMatMask,
    call: CallInfo,
    past: TransportState,
    erases: bool,
) -> tuple[Tensor, TransportState]:
    """Take in tokens after those of a state; rows may stand at different positions."""
    assert call.past is not None
    num_distant, begin, end = boundary_of(mask), call.past.num_tokens, call.num_tokens
    distant, profile, tables, transition = past
    if distant is not None:
        distant = _wait(distant, written_by(tokens), call)
        profile = _wait(profile, routing.profile, call)
        if bool(((begin <= num_distant) & (end > num_distant)).any()):
            tables = _carry(distant[:, :-1], profile[:, :-1], tokens, mask, erases)
        if bool((end > num_distant).all()):
            distant = profile = None
    out = torch.zeros_like(tokens.v)
    if tables is not None:
        is_distant = call.positions() < num_distant
        queries, transition = carry_queries(tokens.close(is_distant), erases, transition)
        out, tables = attend_after(
            tables, queries, torch.zeros_like(tokens.k), out, call, query_type=routing.query_type,
            read_weight=routing.read_weight,
        )  # fmt: skip
        out = out.masked_fill(is_distant[..., None, None], 0)
    return out, TransportState(distant, profile, tables, transition)


def written_by(tokens: DeltaTokens) -> Tensor:
    """Lay what tokens write side by side: k, v, beta and log_decay."""
    log_decay = torch.zeros_like(tokens.beta) if tokens.log_decay is None else tokens.log_decay
    gates = [x.unsqueeze(-1) for x in (tokens.beta, log_decay)]
    return torch.cat([tokens.k, tokens.v, *gates], -1).detach()


def _wait(held: Tensor | None, new: Tensor | None, call: CallInfo) -> Tensor:
    """Put new tokens in their places among those that wait; the last place is for all others."""
    assert held is not None
    assert new is not None
    place = call.positions().expand(call.batch, -1).clamp(max=held.shape[1] - 1)
    if call.real is not None:
        place = place.masked_fill(~call.real, held.shape[1] - 1)
    index = place.view(*place.shape, *[1] * (new.ndim - 2)).expand_as(new)
    return (held if call.inplace else held.clone()).scatter_(1, index, new.to(held.dtype))


def _carry(
    distant: Tensor, profile: Tensor, like: DeltaTokens, mask: SMatMask, erases: bool
) -> SMatState:
    """Carry distant tokens to the boundary and pool them there."""
    k, v, gates = distant.split([like.k.shape[-1], like.v.shape[-1], 2], -1)
    log_decay = None if like.log_decay is None else gates[..., 1]
    keys = carry_keys(DeltaTokens(k, k, v, gates[..., 0], log_decay), erases)
    return SMatState.after(
        keys, v, mask, routing=Routing(profile=profile), feature_map="identity", normalize=False,
        branch="long_range",
    )  # fmt: skip
