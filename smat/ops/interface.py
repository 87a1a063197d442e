"""The public function: arguments checked, padding and packing resolved, then Algorithm 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smat.masks import SMatMask
from smat.masks.boundary import KeptBoundary
from smat.ops.arguments import check_arguments, check_values, one_per_head, several_reads
from smat.ops.backend import choose_backend
from smat.ops.feature_maps import FeatureMap, split_feature_map
from smat.ops.few_rows import attend_few_rows, is_few
from smat.ops.operator import attend
from smat.ops.padding import Padding

if TYPE_CHECKING:
    from smat.ops.decode import SMatState

MAX_KEPT = 1 << 24  # numbers of type tables
BRANCHES = ("both", "causal", "long_range")


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
    backend: str = "auto",
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
        positions: Compute the output only at these positions, (R,): pooling plus R reads.
        attention_mask: (B, T), 0 for padding on either side. Each row gives what its real tokens
            alone would give; padding writes nothing, decays nothing, and its output is 0.
        cu_seqlens: (S + 1,) edges of sequences packed along T, B = 1; each gives what it would give
            alone under ``mask.for_length(its length)``.
        output_final_state: Return the state from which ``state.step`` decodes on; it has no
            gradient.
        branch: "both", or only what a query sees of its recent keys, "causal" (a recurrence that is
            reset at the boundary), or of the distant ones, "long_range". Both together are the sum
            of the two if ``normalize`` is False.
        backend: "auto", "torch".

    Gates, profile and query_type are (B, T, heads), one for each key head; query_type, and any of
    them that is given so, one for each head of the output.
    """
    choose_backend(backend, q)
    _check_branch(branch)
    check_arguments(
        q, k, v, mask, log_decay=log_decay, key_gate=key_gate, write_weight=write_weight,
        profile=profile, query_type=query_type, read_weight=read_weight, positions=positions,
        attention_mask=attention_mask, cu_seqlens=cu_seqlens, output_final_state=output_final_state,
    )  # fmt: skip
    pointwise, before = split_feature_map(feature_map)
    q, k, v, key_gate, log_decay, write_weight, profile = one_per_head(
        q, k, v, key_gate, log_decay, write_weight, profile
    )
    padding = Padding(attention_mask)
    reads: Sequence[Tensor | None] = (query_type, read_weight)
    q, k, v, log_decay, write_weight, profile, *reads = padding.remove(
        q, k, v, log_decay, write_weight, profile, *reads
    )
    key_gate = padding.close(key_gate, k)
    rows = None if padding.moves else positions
    if rows is not None:
        q, reads = q[:, rows], [None if x is None else x[:, rows] for x in reads]
    if before is not None:  # padding is gone, so that a map never meets what it held
        q, k = before(q), before(k)
    gates = (log_decay, key_gate, write_weight, profile)
    options = (cu_seqlens, mask, pointwise, normalize, branch)
    out = _attend(q, k, v, gates, reads, rows, options)
    if rows is None:
        out = padding.restore(out)
        out = out if positions is None else out[:, positions]
    state = None
    if output_final_state:
        from smat.ops.decode import SMatState

        state = SMatState.after(
            k, v, mask, feature_map=feature_map, log_decay=log_decay, key_gate=key_gate,
            write_weight=write_weight, profile=profile, normalize=normalize,
            lengths=padding.lengths, cu_seqlens=cu_seqlens, num_query_heads=out.shape[2],
            mapped=before is not None, weighted=several_reads(query_type, read_weight),
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
    log_decay: Tensor | None = None,
    key_gate: Tensor | None = None,
    write_weight: Tensor | None = None,
    profile: Tensor | None = None,
    query_type: Tensor | None = None,
    read_weight: Tensor | None = None,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    branch: str = "both",
    backend: str = "auto",
) -> Tensor:
    """Attend from a few queries (B, R, H, K) that stand at given positions (R,) among the keys.

    >>> import smat
    >>> mask = smat.SMatMask(seq_len=256, vc_dim=3, chunk_size=32)
    >>> q, k, v = torch.randn(3, 2, 256, 4, 16)
    >>> rows = torch.tensor([255, 7])
    >>> some = smat_attention_at(q[:, rows], k, v, mask, rows)
    >>> torch.allclose(some, smat.smat_attention(q, k, v, mask)[0][:, rows], atol=1e-5)
    True

    The arguments of `smat_attention`; query_type and read_weight are given at these positions too.
    It is for layers that need no query elsewhere: they neither project nor hold one.
    """
    choose_backend(backend, q)
    _check_branch(branch)
    check_arguments(
        q, k, v, mask, log_decay=log_decay, key_gate=key_gate, write_weight=write_weight,
        profile=profile, query_type=query_type, read_weight=read_weight, positions=positions,
        at_positions=True, attention_mask=None, cu_seqlens=cu_seqlens, output_final_state=False,
    )  # fmt: skip
    pointwise, before = split_feature_map(feature_map)
    q, k, v, key_gate, log_decay, write_weight, profile = one_per_head(
        q, k, v, key_gate, log_decay, write_weight, profile
    )
    gates = (log_decay, key_gate, write_weight, profile)
    if before is not None:
        q, k = before(q), before(k)
    # A compiler would trace through the few rows' tables; to it the operator is one node.
    if cu_seqlens is None and not torch.compiler.is_compiling() and is_few(q, k):
        ordered = positions.sort().values
        check_values(log_decay, profile, query_type, None, ordered, mask, k.shape[1])
        with torch.autocast(q.device.type, enabled=False):
            out = attend_few_rows(
                q, k, v, gates, (query_type, read_weight), positions.long(), mask,
                feature_map=pointwise, normalize=normalize, branch=branch,
            )  # fmt: skip
        return out.to(v.dtype)
    options = (cu_seqlens, mask, pointwise, normalize, branch)
    return _attend(q, k, v, gates, (query_type, read_weight), positions, options)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Sequence[Tensor | None],
    reads: Sequence[Tensor | None],
    rows: Tensor | None,
    options: tuple[Any, ...],
) -> Tensor:
    """Call the operator, which wants queries in the order of their positions."""
    log_decay, key_gate, write_weight, profile = gates
    order = None
    if rows is not None:
        rows, order = torch.sort(rows.long())
        q, reads = q[:, order], [None if x is None else x[:, order] for x in reads]
    query_type, read_weight = reads
    if read_weight is not None and query_type is not None and query_type.ndim == 3:
        query_type, read_weight = query_type.unsqueeze(-1), read_weight.unsqueeze(-1)
    cu_seqlens, mask, feature_map, normalize, branch = options
    given = (q, k, v, log_decay, key_gate, write_weight, read_weight)
    keeps = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    num_kept = 0
    if keeps and cu_seqlens is None and branch != "causal":
        num_kept = _num_kept(k, v, normalize, mask)
    wide, *_ = attend(
        *given, profile, query_type, rows, cu_seqlens, mask.recipe, feature_map, normalize, branch,
        num_kept,
    )  # fmt: skip
    out = wide.to(v.dtype)
    return out if order is None else out[:, torch.argsort(order)]


def _num_kept(k: Tensor, v: Tensor, normalize: bool, mask: SMatMask) -> int:
    """Count the numbers of type tables that the backward pass had better find than make again.

    There is one for each head if the boundary stays and some query stands behind it. They are kept
    if they are no larger than what is kept anyway, the queries, keys and values, and not large:
    of long sequences they would take memory that is dearer than a few sums.
    """
    batch, length, heads, value_dim = v.shape
    key_dim, value_dim = k.shape[-1], value_dim + normalize
    of_head = mask.geometry.num_types * key_dim * value_dim
    stays = isinstance(mask.schedule, KeptBoundary) and 0 < mask.schedule.num_distant < length
    is_small = of_head <= length * (2 * key_dim + value_dim)
    num_kept = batch * heads * of_head
    return num_kept if stays and is_small and num_kept <= MAX_KEPT else 0


def _check_branch(branch: str) -> None:
    if branch not in BRANCHES:
        raise ValueError(f"branch must be one of {', '.join(BRANCHES)}, got {branch!r}")
