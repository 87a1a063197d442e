"""Decoding: constant work per token from one exact state (streaming decoding, Algorithm 3)."""

from __future__ import annotations

import itertools
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from smat.masks import SMatMask
from smat.ops.extend import extend_tokens
from smat.ops.feature_maps import FeatureMap
from smat.ops.isolation import isolated
from smat.ops.padding import Padding
from smat.ops.state import StateSizes, StateTables, check_dtype
from smat.ops.state_io import check_tensors, load_arguments, save_state
from smat.ops.step import divide, step_token
from smat.ops.timeline import Timeline, warn_past_horizon
from smat.ops.tokens import load_tokens


class SMatState(StateTables):
    """Everything about the tokens so far that later tokens can see.

    >>> import smat
    >>> mask = smat.SMatMask(seq_len=64, vc_dim=2, chunk_size=8, boundary=smat.window(step=16))
    >>> state = SMatState.empty(mask, batch=1, heads=2, key_dim=4, value_dim=4)
    >>> q, k, v = torch.randn(3, 1, 100, 2, 4)
    >>> for token in zip(q.unbind(1), k.unbind(1), v.unbind(1)):
    ...     out, state = state.step(*token, inplace=True)
    >>> out.shape, state.positions
    (torch.Size([1, 2, 4]), [100])
    >>> prefill, _ = smat.smat_attention(q, k, v, mask)
    >>> torch.allclose(out, prefill[:, -1], atol=1e-5)
    True

    Fixed boundary: B + 1 states once it is passed, profile states before it. Boundary that moves:
    the type table U, the next one while it is built, two profile tables Delta and two recurrent
    states R. Nothing grows with the number of tokens but a list of two integers a boundary.

    Paper: U = ``type_table``; Delta_old, Delta_cur = ``profile_table``; R_old, R_cur = ``recent``.
    """

    @classmethod
    def empty(
        cls,
        mask: SMatMask,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        *,
        query_heads: int | None = None,
        feature_dim: int | None = None,
        feature_map: FeatureMap = "elu",
        normalize: bool = True,
        weighted: bool = False,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        fold: str = "spread",
    ) -> SMatState:
        """Start before the first token.

        >>> state = SMatState.empty(SMatMask(64, vc_dim=1), 1, heads=2, key_dim=4, value_dim=8)
        >>> state.num_bytes == 2 * 4 * (8 + 1) * 4  # d = 1 is linear attention: one state per head
        True

        ``feature_dim`` is the width of a feature map that changes the width of its argument, and
        ``weighted`` makes room for weights where there is no other need for it, at d = 1.
        ``fold="at_once"`` folds when the boundary moves, amortised constant work per token, instead
        of a little with every token.
        """
        check_dtype(dtype)
        query_heads = heads if query_heads is None else query_heads
        feature_dim = key_dim if feature_dim is None else feature_dim
        widths = {"heads": heads, "feature_dim": feature_dim, "value_dim": value_dim}
        for name, size in widths.items():
            if size < 1:
                raise ValueError(f"{name} must be 1 or more, got {size}")
        if query_heads % heads:
            raise ValueError(f"{query_heads} query heads are no multiple of {heads} key heads")
        sizes = StateSizes(heads, query_heads, feature_dim, value_dim, normalize, weighted)
        timeline = Timeline(mask, weighted)
        shape = (timeline.num_slots, batch, heads, feature_dim, sizes.aug_dim)
        recent = torch.zeros(shape, dtype=dtype, device=device)
        rows = [0] * batch
        state = cls(mask, sizes, feature_map, fold, {"recent": recent}, rows, rows, timeline)
        if timeline.at(0).folds:
            state.allocate("profile_table", "profile_epoch")
        if timeline.num_slots > 1:
            state.allocate("type_table")
        return state

    @classmethod
    @isolated
    def after(
        cls,
        k: Tensor,
        v: Tensor,
        mask: SMatMask,
        *,
        feature_map: FeatureMap = "elu",
        log_decay: Tensor | None = None,
        key_gate: Tensor | None = None,
        write_weight: Tensor | None = None,
        profile: Tensor | None = None,
        normalize: bool = True,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        num_query_heads: int | None = None,
        mapped: bool = False,
        weighted: bool = False,
        fold: str = "spread",
    ) -> SMatState:
        """Return the state after a prompt of keys and values, (B, T, H, .).

        >>> import smat
        >>> k, v = torch.randn(2, 3, 40, 2, 4)
        >>> SMatState.after(k, v, smat.SMatMask(64, 2, chunk_size=8)).positions
        [40, 40, 40]

        ``lengths`` says how many tokens of each row are real, if not all; with ``cu_seqlens`` every
        packed sequence becomes a batch row. ``mapped`` says that k already went through a feature
        map that is not pointwise.
        """
        arrays = [k, v, log_decay, key_gate, write_weight, profile]
        tokens_of_row = [k.shape[1]] * len(k) if lengths is None else lengths.tolist()
        if cu_seqlens is not None:
            _check_packed(mask)
            edges = cu_seqlens.tolist()
            tokens_of_row = [stop - start for start, stop in itertools.pairwise(edges)]
            arrays = [None if x is None else _unpack(x, edges) for x in arrays]
        k, v, log_decay, key_gate, write_weight, profile = arrays  # type: ignore[assignment]
        state = cls.empty(
            mask, len(k), v.shape[2], k.shape[3], v.shape[3], query_heads=num_query_heads,
            feature_map=feature_map, normalize=normalize, device=k.device, fold=fold,
            dtype=torch.promote_types(v.dtype, torch.float32),
            weighted=weighted or write_weight is not None,
        )  # fmt: skip
        tokens = load_tokens(
            state, None, k, v, log_decay=log_decay, key_gate=key_gate, write_weight=write_weight,
            profile=profile, mapped=mapped,
        )  # fmt: skip
        extend_tokens(state, tokens, tokens_of_row)
        return state

    @isolated
    def step(
        self,
        q_t: Tensor,
        k_t: Tensor,
        v_t: Tensor,
        log_decay: Tensor | None = None,
        key_gate: Tensor | None = None,
        write_weight: Tensor | None = None,
        profile: Tensor | None = None,
        query_type: Tensor | None = None,
        read_weight: Tensor | None = None,
        inplace: bool = False,
    ) -> tuple[Tensor, SMatState]:
        """Take in one token and attend from it: q_t (B, Hq, K), k_t and v_t (B, Hkv, .).

        >>> import smat
        >>> from smat.masks import type_through_cell
        >>> mask = smat.SMatMask(seq_len=64, vc_dim=3, chunk_size=8, field_size=3)
        >>> q, k, v = torch.randn(3, 1, 41, 2, 4)
        >>> _, state = smat.smat_attention(
        ...     q[:, :40], k[:, :40], v[:, :40], mask, output_final_state=True)
        >>> cell = torch.tensor([[4, 7]])  # a query reads the hyperplane through its own cell ...
        >>> direction = torch.tensor([[0, 2]])  # ... with a direction of its choice
        >>> one_type = type_through_cell(mask.geometry, direction, cell)
        >>> out, after = state.step(q[:, 40], k[:, 40], v[:, 40], query_type=one_type)
        >>> out.shape, state.positions, after.positions
        (torch.Size([1, 2, 4]), [40], [41])

        y_t = phi_t . (exp(lambda_t - lambda_n) U[type] + R), divided by its last column.

        ``query_type`` (B, Hq) reads another type than the positional one; (B, Hq, k) with
        ``read_weight`` (B, Hq, k) reads the weighted sum of k types. Gates, profile: (B, Hkv).
        Heads that share a key are grouped as in ``smat_attention``.
        The old state stays valid, at the price of copying the tables that a token writes to;
        ``inplace=True`` writes into this state and returns it: the fast path. Not differentiable.
        """
        per_token = {
            "log_decay": log_decay, "key_gate": key_gate, "write_weight": write_weight,
            "profile": profile, "query_type": query_type, "read_weight": read_weight,
        }  # fmt: skip
        with_time = {name: _one_token(name, x) for name, x in per_token.items()}
        q, k, v = (_one_token(name, x) for name, x in (("q_t", q_t), ("k_t", k_t), ("v_t", v_t)))
        tokens = load_tokens(self, q, k, v, **with_time)
        state = self if inplace else self.fork()
        last = max((group.position for group in state.groups), default=0)
        warn_past_horizon(state.mask, last + 1)
        y = step_token(state, tokens, spread=inplace and state.num_buffers > 1)
        return divide(y, state.sizes.normalize).to(v_t.dtype), state

    @isolated
    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None = None,
        key_gate: Tensor | None = None,
        write_weight: Tensor | None = None,
        profile: Tensor | None = None,
        query_type: Tensor | None = None,
        read_weight: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inplace: bool = False,
    ) -> tuple[Tensor, SMatState]:
        """Take in several tokens, (B, T, heads, .), as one long prefill would.

        >>> import smat
        >>> mask = smat.SMatMask(seq_len=64, vc_dim=2, chunk_size=8)
        >>> q, k, v = torch.randn(3, 1, 50, 2, 4)
        >>> whole, _ = smat.smat_attention(q, k, v, mask)
        >>> _, state = smat.smat_attention(
        ...     q[:, :20], k[:, :20], v[:, :20], mask, output_final_state=True)
        >>> out, state = state.extend(q[:, 20:], k[:, 20:], v[:, 20:])
        >>> torch.allclose(out, whole[:, 20:], atol=1e-5), state.positions
        (True, [50])

        The arguments of ``step`` with a time axis. ``attention_mask`` (B, T) is 0 for padding.
        """
        padding = Padding(attention_mask)
        arrays = {
            "log_decay": log_decay, "key_gate": key_gate, "write_weight": write_weight,
            "profile": profile, "query_type": query_type, "read_weight": read_weight,
        }  # fmt: skip
        if padding.moves:
            q, k, v = (padding.front(x) for x in (q, k, v))
            arrays = {name: None if x is None else padding.front(x) for name, x in arrays.items()}
        tokens = load_tokens(self, q, k, v, **arrays)  # type: ignore[arg-type]
        state = self if inplace else self.fork()
        lengths = [k.shape[1]] * len(k) if padding.lengths is None else padding.lengths.tolist()
        ends = (at + count for at, count in zip(state.positions, lengths, strict=True))
        warn_past_horizon(state.mask, max(ends, default=0))
        y = extend_tokens(state, tokens, lengths, spread=inplace and state.num_buffers > 1)
        assert y is not None
        out = divide(y, state.sizes.normalize).to(v.dtype)
        return padding.restore(out), state

    def save(self, path: str | PathLike[str]) -> None:
        """Write the state to a safetensors file, with everything that is needed to go on."""
        save_state(self, path)

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        mask: SMatMask | None = None,
        feature_map: FeatureMap | None = None,
        device: torch.device | str = "cpu",
    ) -> SMatState:
        """Read a state that ``save`` wrote; the next steps are those of the saved one, bit for bit.

        A mask that is given must be the state's own. A state with a feature map of the caller's
        needs it again.
        """
        state = cls(**load_arguments(path, mask, feature_map, device))
        check_tensors(state, path)
        return state


def _check_packed(mask: SMatMask) -> None:
    if not mask.boundary.horizon_free and mask.vc_dim > 1:
        raise ValueError(
            f"packed sequences cannot share a state under {mask.describe()}: each has the mask of "
            "its own length, with tables of its own size; use a boundary that needs no horizon, or "
            "pad the sequences instead of packing them"
        )


def _unpack(x: Tensor, edges: list[int]) -> Tensor:
    """(1, T, ...) -> (S, longest, ...), zeros behind each sequence."""
    parts = [x[0, start:stop] for start, stop in itertools.pairwise(edges)]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def _one_token(name: str, x: Tensor | None) -> Any:
    if x is None:
        return None
    if x.ndim < 2:
        raise ValueError(f"{name} must be (batch, heads, ...), got {tuple(x.shape)}")
    return x.unsqueeze(1)
