"""What a delta-rule backbone reads of its memory (appendix "Memory updates", GDN).

Every profile undergoes the backbone's transitions, and only the chosen one receives the payload,

    F_x <- A_j F_x + 1{x_j = x} omega_j beta_j k_j v_j',      A_j = a_j (I - beta_j k_j k_j').

All profiles share the transitions, so keys are carried to the boundary n and pooled additively,
and queries are carried back to it: O(T) work, never a product of matrices a token. At the boundary
it is SMat-Attention between carried queries and carried keys, to which recent tokens add nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.layers.call import CallInfo, attend_after
from smat.layers.routing.routers import Assignment
from smat.masks import SMatMask
from smat.masks.boundary import KeptBoundary
from smat.ops import SMatState, smat_attention
from smat.ops.transport import transport_keys, transport_queries


class DeltaTokens(NamedTuple):
    """What the gated delta rule takes."""

    q: Tensor  # (B, T, H, K), unit length
    k: Tensor  # (B, T, H, K), unit length
    v: Tensor  # (B, T, H, V)
    beta: Tensor  # (B, T, H)
    log_decay: Tensor | None  # (B, T, H)

    def cut(self, start: int, stop: int) -> DeltaTokens:
        """Take a range of time."""
        log_decay = None if self.log_decay is None else self.log_decay[:, start:stop]
        q, k, v, beta = (x[:, start:stop] for x in (self.q, self.k, self.v, self.beta))
        return DeltaTokens(q, k, v, beta, log_decay)

    def close(self, shut: Tensor) -> DeltaTokens:
        """Close the gates of some tokens (B, T), so that they change no state."""
        shut, log_decay = shut.unsqueeze(-1), self.log_decay
        if log_decay is not None:
            log_decay = log_decay.masked_fill(shut, 0)
        return self._replace(beta=self.beta.masked_fill(shut, 0), log_decay=log_decay)


class DistantTokens(NamedTuple):
    """Tokens that wait for the boundary, (B, n + 1, H, .): zeros where none came yet.

    The last place is for what does not belong here.
    """

    k: Tensor
    v: Tensor
    beta: Tensor
    profile: Tensor
    log_decay: Tensor | None


class TransportState(NamedTuple):
    """What decoding carries: distant tokens, tables, and the transitions since the boundary.

    Until it reads, a row waits with its distant tokens. Then they are carried to the boundary at
    once, and from there on the tables stand still: they are a state of SMat-Attention whose recent
    keys are all zero.
    """

    distant: DistantTokens | None  # None once all rows have read
    tables: SMatState | None = None  # None until a row has
    transition: Tensor | None = None  # (B, H, K, K), the product of the recent A_t


def boundary_of(mask: SMatMask) -> int:
    """Return n, which must never move: a fold would have to carry the whole type table."""
    if not isinstance(mask.boundary, KeptBoundary):
        raise ValueError(f"the delta rule needs a kept boundary, got {mask.describe()}")
    return mask.boundary.num_distant


def read_transported(
    tokens: DeltaTokens, assignment: Assignment, mask: SMatMask, call: CallInfo
) -> tuple[Tensor, TransportState | None]:
    """Return what the tokens of a call read of the distant ones, (B, T, H, V), and the state.

    z_t = lambda_t q-bar_t' sum_h R_th U_h with U = C F at the boundary, F_x the sum of k-bar_j v_j'
    over the tokens of profile x; q-bar has the scale K^-1/2. ``call.before("memory")`` is the state
    before them, after which there is no gradient.

    Paper: k-bar, q-bar = what `transport_keys` and `transport_queries` return, a = exp `log_decay`.
    """
    num_distant, past = boundary_of(mask), call.before("memory")
    if num_distant == 0:
        return torch.zeros_like(tokens.v), None
    if call.real is not None:
        tokens = tokens.close(~call.real)
    if past is not None:
        with torch.no_grad():
            return _decode(tokens, assignment, mask, call, past)
    out, tables, transition = torch.zeros_like(tokens.v), None, None
    if num_distant < call.length:
        far, near = tokens.cut(0, num_distant), tokens.cut(num_distant, call.length)
        queries, transition = transport_queries(
            near.q, near.k, near.beta, near.log_decay, output_final_transition=True
        )
        keys = transport_keys(far.k, far.beta, far.log_decay)
        read, tables = smat_attention(
            F.pad(queries, (0, 0, 0, 0, num_distant, 0)),
            F.pad(keys, (0, 0, 0, 0, 0, call.length - num_distant)), tokens.v, mask,
            feature_map="identity", normalize=False, branch="long_range",
            output_final_state=call.use_cache, **assignment._asdict(),
        )  # fmt: skip
        out = call.close(read)
    if not call.use_cache:
        return out, None
    distant = None
    if bool((call.num_tokens <= num_distant).any()):
        shape = (call.batch, num_distant + 1)
        new = _written(tokens, assignment)
        empty = [None if x is None else x.new_zeros(*shape, *x.shape[2:]) for x in new]
        distant = _wait(DistantTokens(*empty), new, num_distant, call)  # type: ignore[arg-type]
    transition = None if transition is None else transition.detach()
    return out, TransportState(distant, tables, transition)


def _decode(
    tokens: DeltaTokens,
    assignment: Assignment,
    mask: SMatMask,
    call: CallInfo,
    past: TransportState,
) -> tuple[Tensor, TransportState]:
    """Take in tokens after those of a state; rows may stand at different positions."""
    assert call.past is not None
    num_distant, begin, end = boundary_of(mask), call.past.num_tokens, call.num_tokens
    distant, tables, _ = past
    if distant is not None:
        distant = _wait(distant, _written(tokens, assignment), num_distant, call)
        if bool(((begin <= num_distant) & (end > num_distant)).any()):
            tables = _carry(distant, mask, num_distant)
        distant = distant if bool((end <= num_distant).any()) else None
    nothing = torch.zeros_like(tokens.v)
    if tables is None:
        return nothing, TransportState(distant)
    is_distant = call.positions() < num_distant
    near = tokens.close(is_distant)
    queries, transition = transport_queries(
        near.q, near.k, near.beta, near.log_decay, initial_transition=past.transition,
        output_final_transition=True,
    )  # fmt: skip
    out, tables = attend_after(
        tables, queries, torch.zeros_like(near.k), nothing, call,
        query_type=assignment.query_type, read_weight=assignment.read_weight,
    )  # fmt: skip
    out = out.masked_fill(is_distant[..., None, None], 0)
    return out, TransportState(distant, tables, transition)


def _written(tokens: DeltaTokens, assignment: Assignment) -> DistantTokens:
    assert assignment.profile is not None
    log_decay = None if tokens.log_decay is None else tokens.log_decay.detach()
    k, v, beta = (x.detach() for x in (tokens.k, tokens.v, tokens.beta))
    return DistantTokens(k, v, beta, assignment.profile, log_decay)


def _wait(
    distant: DistantTokens, new: DistantTokens, num_distant: int, call: CallInfo
) -> DistantTokens:
    """Put new tokens in their places among the distant ones."""
    place = call.positions().expand(call.batch, -1).clamp(max=num_distant)
    if call.real is not None:
        place = place.masked_fill(~call.real, num_distant)

    def put(old: Tensor | None, x: Tensor | None) -> Tensor | None:
        if old is None or x is None:
            return None
        index = place.view(*place.shape, *[1] * (x.ndim - 2)).expand_as(x)
        return (old if call.inplace else old.clone()).scatter_(1, index, x.to(old.dtype))

    held = [put(old, x) for old, x in zip(distant, new, strict=True)]
    return DistantTokens(*held)  # type: ignore[arg-type]


def _carry(distant: DistantTokens, mask: SMatMask, num_distant: int) -> SMatState:
    """Carry distant tokens to the boundary and pool them there."""
    k, v, beta, profile = (x[:, :num_distant] for x in distant[:4])
    log_decay = None if distant.log_decay is None else distant.log_decay[:, :num_distant]
    return SMatState.after(
        transport_keys(k, beta, log_decay), v, mask, feature_map="identity", normalize=False,
        profile=profile, weighted=True,
    )  # fmt: skip
