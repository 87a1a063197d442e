"""The public functions: arguments checked, padding resolved, then Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smat.distributed import active_share, open_contexts
from smat.masks import SMatMask
from smat.ops.backend import choose_backend
from smat.ops.feature_maps import FeatureMap, repeat_heads, split_feature_map
from smat.ops.smat import arguments as check
from smat.ops.smat.at_rows import attend_few, is_few
from smat.ops.smat.decode import SMatState
from smat.ops.smat.operator import run_operator
from smat.ops.smat.over_ranks import attend_over_ranks, check_share
from smat.ops.smat.padding import Padding
from smat.ops.smat.routing import Gates, Options, Routing, sort_per_token
from smat.ops.smat.step import check_features


def smat_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SMatMask,
    *,
    feature_map: FeatureMap = "elu",
    log_decay: Tensor | None = None,
    key_gate: Tensor | None = None,
    write_weight: Tensor | None = None,
    profile: Tensor | None = None,
    query_type: Tensor | None = None,
    read_weight: Tensor | None = None,
    normalize: bool = True,
    positions: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    branch: str = "both",
    decay_scope: str = "all",
    backend: str = "auto",
    group: Any = None,
) -> tuple[Tensor, SMatState | None]:
    """Attend under an SMat mask, in work linear in T for every VC dimension.

    >>> import smat
    >>> mask = smat.SMatMask(seq_len=256, vc_dim=3, chunk_size=32)
    >>> q, k, v = torch.randn(3, 2, 256, 4, 16)
    >>> out, state = smat.smat_attention(q, k, v, mask)
    >>> out.shape, state
    (torch.Size([2, 256, 4, 16]), None)

    o_i = sum_j M_ij (phi_i . psi_j) v_j / sum_j M_ij (phi_i . psi_j), with phi = feature_map(q) and
    psi = key_gate * feature_map(k) (equation 3); gates multiply M_ij by exp(lambda_i - lambda_j).

    Args:
        q: Queries (B, T, H, K); T may be shorter than ``mask.seq_len``: the leading block is meant.
        k: Keys (B, T, Hk, K), Hk dividing H: H / Hk consecutive query heads share a key head.
        v: Values (B, T, Hk, V). Or, with H = Hk, (B, T, Hv, V): Hv / Hk consecutive value heads
            share a query and a key, as in a group of Mamba-2, and there are Hv heads of output.
        mask: Who sees whom.
        feature_map: "elu" (elu + 1), "relu", "identity", "favor" (Performer's positive random
            features), or a callable with non-negative output.
        log_decay: Natural logarithm of each token's decay, at most 0; -inf forgets all before it.
        key_gate: h_j >= 0, scales what a token writes.
        write_weight: Scales only what a token writes to its profile: the straight-through weight.
        profile: The profile that each token writes to, instead of the positional one.
        query_type: The type that each query reads, instead of the positional one; (B, T, H, k) for
            k reads a query, which are added up.
        read_weight: (B, T, H, k), the weight of each read, of the normaliser's part too.
        normalize: Divide by the sum of weights; a row that sees nothing gives 0.
        positions: Compute the output only at these positions, (R,).
        attention_mask: (B, T), 0 for padding on either side. Each row gives what its real tokens
            alone would give; padding writes nothing, decays nothing, and its output is 0.
        cu_seqlens: (S + 1,) edges of sequences packed along T, B = 1; each gives what it would give
            alone under ``mask.for_length(its length)``.
        output_final_state: Return the state from which ``state.step`` decodes on; it has no
            gradient.
        branch: "both", or only what a query sees of its recent keys, "causal" (a recurrence that is
            reset at the boundary), or of the distant ones, "long_range". Both together are the sum
            of the two if ``normalize`` is False.
        decay_scope: "all" (every key decays) or "recurrent" (distant keys do not).
        backend: "auto", "torch", "native" on a CPU, or "triton" on a GPU.
        group: The ranks that hold the sequence together: see `smat.context_parallel`.

    Gates, profile and query_type are (B, T, heads), one for each key head; query_type, and any of
    them that is given so, one for each head of the output. Numbers that are not finite give numbers
    that are not finite, in all rows of their chunk and in later ones.
    """
    gates = Gates(log_decay, key_gate)
    routing = Routing(profile, query_type, write_weight, read_weight)
    _check(q, k, v, mask, gates, routing, branch, decay_scope, backend)
    share = active_share(k, group) if open_contexts or group is not None else None
    if positions is not None:
        check.check_positions(positions, k)
        positions = positions.long()
    if cu_seqlens is not None:
        check.check_packing(cu_seqlens, q)
        if attention_mask is not None:
            raise ValueError("attention_mask and cu_seqlens exclude each other: pack or pad")
    elif share is None:
        check.check_length(k, mask)
    else:
        mask.check_length(share.total)
    padding = None
    if attention_mask is not None:
        check.check_padding(attention_mask, q.shape[:2], q.device)
        padding = Padding(attention_mask)
        q, k, v, gates, routing = padding.remove_all(q, k, v, gates, routing)
    pointwise, q, k = _map_features(feature_map, q, k)
    dtype = v.dtype
    q, k, v, gates, routing = one_per_head(q, k, v, gates, routing)
    options = Options(mask, pointwise, normalize, branch, decay_scope, backend)
    before = None
    if share is not None:
        check_share(share, padding, cu_seqlens, output_final_state)
        given = (q, k, v, gates, routing, cu_seqlens, options, share, output_final_state)
        out, carried = attend_over_ranks(*given)
        out, before = out if positions is None else out[:, positions], carried.restore
    elif positions is not None and padding is None:
        reads = _reads_at(routing, positions)
        out = run_operator(_rows(q, positions), k, v, gates, reads, positions, cu_seqlens, options)
    else:
        out = run_operator(q, k, v, gates, routing, None, cu_seqlens, options)
    if padding is not None:
        out = padding.restore(out)
        out = out if positions is None else out[:, positions]
    out = out.to(dtype)
    if not output_final_state:
        return out, None
    state = SMatState.after(
        k, v, mask, gates, routing, feature_map=feature_map, normalize=normalize, branch=branch,
        decay_scope=decay_scope, num_query_heads=out.shape[2], mapped=pointwise != feature_map,
        lengths=None if padding is None else padding.lengths, cu_seqlens=cu_seqlens, before=before,
    )  # fmt: skip
    return out, state


def smat_attention_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SMatMask,
    positions: Tensor,
    *,
    feature_map: FeatureMap = "elu",
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    branch: str = "both",
    decay_scope: str = "all",
    backend: str = "auto",
    neighbours: Sequence[Routing] = (),
    **per_token: Tensor | None,
) -> Tensor:
    """Attend from a few queries (B, R, H, K) that stand at given positions (R,) among the keys.

    >>> import smat
    >>> mask = smat.SMatMask(seq_len=256, vc_dim=3, chunk_size=32)
    >>> q, k, v = torch.randn(3, 2, 256, 4, 16)
    >>> rows = torch.tensor([255, 7])
    >>> some = smat_attention_at(q[:, rows], k, v, mask, rows)
    >>> torch.allclose(some, smat.smat_attention(q, k, v, mask)[0][:, rows], atol=1e-5)
    True

    The arguments of `smat_attention`: gates, profile and write_weight for all tokens, query_type
    and read_weight at these positions. It is for layers that need no query elsewhere, and may have
    `neighbours`: more profiles, in which tokens write with a weight of 0 for its gradient's sake.
    """
    gates, routing = sort_per_token("smat_attention_at", per_token)
    check.check_tensor("positions", positions, "integers")
    _check(q, k, v, mask, gates, routing, branch, decay_scope, backend, positions.numel())
    check.check_positions(positions, k)
    if cu_seqlens is not None:
        check.check_packing(cu_seqlens, q)
    else:
        check.check_length(k, mask)
    pointwise, q, k = _map_features(feature_map, q, k)
    dtype = v.dtype
    q, k, v, gates, routing = one_per_head(q, k, v, gates, routing)
    options = Options(mask, pointwise, normalize, branch, decay_scope, backend)
    # A compiler would trace through the written-out rows; to it the operator is one node.
    if cu_seqlens is None and not torch.compiler.is_compiling() and is_few(q, k):
        return attend_few(q, k, v, gates, routing, positions, options, neighbours).to(dtype)
    out = run_operator(q, k, v, gates, routing, positions, cu_seqlens, options)
    for each in neighbours:
        written = options._replace(branch="long_range")
        out = out + run_operator(q, k, v, gates, each, positions, cu_seqlens, written)
    return out.to(dtype)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SMatMask,
    gates: Gates,
    routing: Routing,
    branch: str,
    decay_scope: str,
    backend: str,
    num_queries: int | None = None,
) -> None:
    check.check_mask(mask)
    check.check_qkv(q, k, v, num_queries)
    check.check_choice("branch", branch, check.BRANCHES)
    check.check_choice("decay_scope", decay_scope, check.DECAY_SCOPES)
    check.check_gates_and_routing(q, k, v, gates, routing)
    if not torch.compiler.is_compiling():  # the operator chooses for itself
        choose_backend(backend, q.device)


def _map_features(feature_map: FeatureMap, q: Tensor, k: Tensor) -> tuple[str, Tensor, Tensor]:
    """Apply a map that the op does not know; the name of what is left for the op to apply."""
    pointwise, before = split_feature_map(feature_map)
    if before is None:
        return pointwise, q, k
    mapped = before(q), before(k)
    check_features("q", q, mapped[0])
    check_features("k", k, mapped[1])
    return pointwise, *mapped


def one_per_head(
    q: Tensor, k: Tensor, v: Tensor, gates: Gates, routing: Routing
) -> tuple[Tensor, Tensor, Tensor, Gates, Routing]:
    """Give keys, values, gates and routing the heads that the op wants.

    If a gate differs between query heads, keys and values do. Where heads of values share a key,
    only the key gate tells keys apart.
    """
    num_heads = max(q.shape[2], v.shape[2])
    per_value = (gates.log_decay, routing.write_weight, routing.profile)
    key_gate = gates.key_gate
    if v.shape[2] > k.shape[2]:
        if key_gate is not None and key_gate.shape[2] > k.shape[2]:
            q, k = (repeat_heads(x, num_heads) for x in (q, k))
        per_value = tuple(repeat_heads(x, num_heads) for x in per_value)
    elif any(x is not None and x.shape[2] != k.shape[2] for x in (key_gate, *per_value)):
        k, v, key_gate, *rest = (repeat_heads(x, num_heads) for x in (k, v, key_gate, *per_value))
        per_value = tuple(rest)
    log_decay, write_weight, profile = per_value
    routing = routing._replace(write_weight=write_weight, profile=profile)
    return q, k, v, Gates(log_decay, key_gate), routing


def _rows(x: Tensor, positions: Tensor) -> Tensor:
    """Take rows of (B, T, ...), widened: the gradients of a repeated one are added up in fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))[:, positions]


def _reads_at(routing: Routing, positions: Tensor) -> Routing:
    types, weight = routing.query_type, routing.read_weight
    return routing._replace(
        query_type=None if types is None else types[:, positions],
        read_weight=None if weight is None else _rows(weight, positions),
    )
