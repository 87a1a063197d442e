"""The delta rule over ranks: a rank's states and queries as if nothing came before, then what did.

A state that comes in is only multiplied by a rank's transitions, so queries that are carried back
to the beginning of the share read it there: `transport_queries`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smat.distributed import Piece, Share
from smat.distributed.exchange import scan_rows, without_autocast
from smat.ops.delta_rule.delta_rule import delta_rule, transport_queries


@without_autocast
def delta_rule_over_ranks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    share: Share,
    rows: Sequence[Piece] | None = None,
    *,
    scale: float | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over the tokens of all ranks: out, and the state after a rank's own.

    The arguments of `delta_rule`, on every rank its own tokens. `rows` says that rows are pieces of
    packed sequences (`scan_rows`), with idle tokens behind them.
    """
    out, written = delta_rule(
        q, k, v, beta, log_decay, scale=scale, output_final_state=True, chunk_size=chunk_size
    )
    queries, transition = transport_queries(
        q, k, beta, log_decay, scale=scale, output_final_transition=True, chunk_size=chunk_size
    )
    assert written is not None
    assert transition is not None
    (before,), link = scan_rows([(written, transition)], share, rows)
    came = torch.einsum("bthk,bhkv->bthv", queries.to(before.dtype), before) + link
    return out + came.to(out.dtype), written + transition @ before
