"""Profile memories beside a delta-rule backbone (appendix "Memory updates", GDN).

Every profile undergoes the backbone's transitions, and only the chosen one receives the payload,

    F_x <- A_j F_x + 1{x_j = x} omega_j beta_j k_j v_j',      A_j = a_j (I - beta_j k_j k_j').

All profiles share the transitions, so keys are carried to the boundary n and pooled additively,
and queries are carried back to it: O(T) work, never a product of matrices a token.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from smat.layers.routed_memory import RoutedMemory, read_types, whole_span
from smat.layers.routing import Route
from smat.layers.span import Span
from smat.layers.transport_state import TransportState, take_tokens
from smat.masks import SMatMask
from smat.ops.delta_rule import transport_keys, transport_queries


class TransportedMemory(RoutedMemory):
    """Boundary-transported profile memories with learned routing, for Gated DeltaNet.

    >>> import torch
    >>> mask = SMatMask(seq_len=64, vc_dim=3, chunk_size=16, field_size=3)
    >>> memory = TransportedMemory(hidden_size=8, num_heads=2, mask=mask)
    >>> hidden, log_decay = torch.randn(1, 64, 8), -0.1 * torch.rand(1, 64, 2)
    >>> q, k, v = F.normalize(torch.randn(3, 1, 64, 2, 4), dim=-1)
    >>> out, _ = memory(hidden, q, k, v, log_decay, torch.rand(1, 64, 2))
    >>> out.shape, bool((out[:, :32] == 0).all())  # nothing is distant for the first half
    (torch.Size([1, 64, 2, 4]), True)

    z_t = lambda_t q-bar_t' sum_h R_th U_h with U = C F at the boundary, F_x the sum of k-bar_j v_j'
    over the tokens of profile x; q-bar has the scale K^-1/2. The boundary must never move: a fold
    would have to transport every entry of the type table.

    Paper: k-bar, q-bar = what `transport_keys` and `transport_queries` return, a = exp `log_decay`.
    """

    def forward(
        self,
        hidden_states: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None = None,
        beta: Tensor | None = None,
        span: Span | None = None,
    ) -> tuple[Tensor, TransportState | None]:
        """Return what the tokens of a span read, (B, T, H, V), and the state if it is wanted.

        `hidden_states` (B, T, hidden_size) is the layer's input, from which writes and reads are
        routed; q, k (B, T, H, K) of length 1, v (B, T, H, V), gates (B, T, H). Without a span it is
        all one batch of new sequences. After the tokens of an earlier state there is no gradient.
        """
        if beta is None:
            raise ValueError("transported memories need beta; ProfileMemory does without")
        span = whole_span(hidden_states) if span is None else span
        if span.cu_seqlens is not None:
            raise ValueError("transported memories take sequences side by side, not packed")
        beta = span.quiet(beta)
        log_decay = None if log_decay is None else span.quiet(log_decay)
        past: TransportState | None = span.part("memory")
        if past is not None:
            route = self.route(hidden_states, past.mask, span, past.hash_input)
            return self._decode(hidden_states, q, k, v, log_decay, beta, span, past, route)
        mask = self.mask_of(span)
        num_distant = min(_num_distant(mask), span.length)
        route = self.route(hidden_states, mask, span, None, num_distant)
        out = self._read(q, k, v, log_decay, beta, mask, span, route)
        if not span.use_cache:
            return out, None
        reads = [F.pad(x, (0, 0, 0, 0, num_distant, 0)) for x in route.reads]
        route = Route(route.address, type(route.reads)(*reads))
        empty = self.empty_state(hidden_states, mask)
        given = replace(span, inplace=True)
        _, state = self._decode(hidden_states, q, k, v, log_decay, beta, given, empty, route)
        return out, state

    def _read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor,
        mask: SMatMask,
        span: Span,
        route: Route,
    ) -> Tensor:
        """Read with gradients, from the beginning of the sequences."""
        num_distant = min(_num_distant(mask), span.length)
        num_recent = span.length - num_distant
        if num_recent == 0 or num_distant == 0:
            return v.new_zeros(v.shape)
        gates = (None, None) if log_decay is None else log_decay.split([num_distant, num_recent], 1)
        (far, near), (beta_far, beta_near) = (
            x.split([num_distant, num_recent], 1) for x in (k, beta)
        )
        keys = transport_keys(far, beta_far, gates[0])
        queries, _ = transport_queries(q[:, num_distant:], near, beta_near, gates[1])
        return read_types(
            queries, F.pad(keys, (0, 0, 0, 0, 0, num_recent)), v, self.routing.read_mask(mask),
            route.reads, num_distant, span, profile=route.address.profile,
            write_weight=route.address.ste_weight,
        )  # fmt: skip

    def empty_state(self, hidden_states: Tensor, mask: SMatMask | None = None) -> TransportState:
        """Return the state before the first token of a batch like (B, ..., hidden_size)."""
        hash_input = self.routing.hash.empty_state(hidden_states)
        mask = mask or self.mask
        _ = _num_distant(mask)  # refuses a boundary that moves
        geometry = self.routing.read_mask(mask).geometry
        return TransportState(mask, geometry, hash_input, [0] * len(hidden_states))

    def step(
        self,
        hidden_state: Tensor,
        q_t: Tensor,
        k_t: Tensor,
        v_t: Tensor,
        log_decay: Tensor | None,
        beta: Tensor,
        state: TransportState,
        *,
        inplace: bool = False,
    ) -> tuple[Tensor, TransportState]:
        """Take one token, (B, hidden_size) and (B, H, .), and return what it reads, (B, H, V)."""
        hidden, q, k, v, gate = (x.unsqueeze(1) for x in (hidden_state, q_t, k_t, v_t, beta))
        decay = None if log_decay is None else log_decay.unsqueeze(1)
        span = Span(len(k), 1, k.device, use_cache=True, inplace=inplace)
        route = self.route(hidden, state.mask, span, state.hash_input)
        out, after = self._decode(hidden, q, k, v, decay, gate, span, state, route)
        return out[:, 0], after

    def _decode(
        self,
        hidden: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor,
        span: Span,
        past: TransportState,
        route: Route,
    ) -> tuple[Tensor, TransportState]:
        state = past if span.inplace else past.fork()
        written = {"k": k, "v": v, "beta": beta, "profile": route.address.profile}
        if log_decay is not None:
            written["log_decay"] = log_decay
        lengths = [span.length] * span.batch if span.lengths is None else span.lengths.tolist()
        out = take_tokens(state, q, written, route.reads, lengths)
        state.hash_input = self.next_hash_state(hidden, span, state.hash_input)
        return out, state


def _num_distant(mask: SMatMask) -> int:
    if mask.boundary.moves:
        raise ValueError(f"transport needs a boundary that stays, got {mask.describe()}")
    return mask.schedule.anchor
