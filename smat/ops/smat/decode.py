"""Decoding: constant work per token from one exact state (streaming decoding, Algorithm 3)."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from functools import cache
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from smat.geometry.field import check_integer
from smat.masks import SMatMask, SMatWarning
from smat.ops.backend import choose_backend
from smat.ops.feature_maps import FeatureMap
from smat.ops.smat import arguments as check
from smat.ops.smat.extend import extend_tokens
from smat.ops.smat.padding import Padding, unpack
from smat.ops.smat.routing import NO_GATES, POSITIONAL, Gates, Inputs, Routing, sort_per_token
from smat.ops.smat.state import StateSpec, StateTables, check_dtype, isolated
from smat.ops.smat.state_io import load_state, save_state
from smat.ops.smat.step import divide, load_tokens

TOKEN = ("q_t", "k_t", "v_t", *Gates._fields, *Routing._fields)


class SMatState(StateTables):
    """Everything about the tokens so far that later tokens can see.

    >>> import smat
    >>> window = smat.schedules.window(step=16)
    >>> mask = smat.SMatMask(seq_len=64, vc_dim=2, chunk_size=8, boundary=window)
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
    states R. Nothing grows with the number of tokens.

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
        branch: str = "both",
        decay_scope: str = "all",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        fold: str = "spread",
    ) -> Self:
        """Start before the first token.

        >>> state = SMatState.empty(SMatMask(64, vc_dim=1), 1, heads=2, key_dim=4, value_dim=8)
        >>> state.num_bytes == 2 * 4 * (8 + 1) * 4  # d = 1 is linear attention: one state per head
        True

        ``feature_dim`` is the width of a feature map that changes the width of its argument, and
        ``weighted`` makes room for weights where there is no other need for it, at d = 1.
        ``branch`` and ``decay_scope`` are those of `smat_attention`. ``fold="at_once"`` folds when
        the boundary moves, amortised constant work per token, instead of a little with every token.
        """
        check_dtype(dtype)
        check.check_mask(mask)
        spec = StateSpec(
            heads, heads if query_heads is None else query_heads,
            key_dim if feature_dim is None else feature_dim, value_dim, normalize, weighted, branch,
            decay_scope, fold,
        )  # fmt: skip
        batch = check_integer("batch", batch, least=0)
        shape = (1, batch, heads, spec.feature_dim, spec.aug_dim)
        recent = torch.zeros(shape, dtype=dtype, device=device)
        state = cls(mask, spec, feature_map, {"recent": recent}, [0] * batch, [0] * batch)
        if state.schedule.moves:
            state.tensors["recent"] = recent.repeat(state.num_slots, 1, 1, 1, 1)
        if state.has_tables and state.schedule.num_segments != 1:
            state.allocate("profile_table", *(["type_table"] if state.schedule.moves else []))
        return state

    @classmethod
    @isolated
    def after(
        cls,
        k: Tensor,
        v: Tensor,
        mask: SMatMask,
        gates: Gates = NO_GATES,
        routing: Routing = POSITIONAL,
        *,
        feature_map: FeatureMap = "elu",
        normalize: bool = True,
        branch: str = "both",
        decay_scope: str = "all",
        num_query_heads: int | None = None,
        lengths: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        mapped: bool = False,
        before: Callable[[StateTables], None] | None = None,
    ) -> Self:
        """Return the state after a prompt of keys and values, (B, T, H, .).

        >>> import smat
        >>> k, v = torch.randn(2, 3, 40, 2, 4)
        >>> SMatState.after(k, v, smat.SMatMask(64, 2, chunk_size=8)).positions
        [40, 40, 40]

        ``lengths`` says how many tokens of each row are real, if not all; with ``cu_seqlens`` every
        packed sequence becomes a batch row. ``mapped`` says that k already went through a feature
        map that is not pointwise. Of the routing, what is said of reads only makes room for them.
        ``before`` brings in what came before the prompt.
        """
        tokens_of_row = [k.shape[1]] * len(k) if lengths is None else lengths.tolist()
        if cu_seqlens is not None:
            if not mask.boundary.horizon_free and mask.vc_dim > 1:
                raise ValueError(
                    f"packed sequences cannot share a state under {mask.describe()}: each has "
                    "tables of its own size; use a boundary that needs no horizon, or pad them"
                )
            edges = cu_seqlens.tolist()
            tokens_of_row = [stop - start for start, stop in itertools.pairwise(edges)]
            k, v = unpack(k, edges), unpack(v, edges)
            gates = Gates(*(unpack(x, edges) for x in gates))
            routing = Routing(*(unpack(x, edges) for x in routing))
        several = routing.query_type is not None and routing.query_type.ndim == 4
        weighted = several or routing.read_weight is not None or routing.write_weight is not None
        state = cls.empty(
            mask, len(k), v.shape[2], k.shape[3], v.shape[3], query_heads=num_query_heads,
            feature_map=feature_map, normalize=normalize, weighted=weighted, branch=branch,
            decay_scope=decay_scope, device=k.device,
            dtype=torch.promote_types(v.dtype, torch.float32),
        )  # fmt: skip
        if before is not None:
            before(state)
        writes = routing._replace(query_type=None, read_weight=None)
        extend_tokens(state, load_tokens(state, None, k, v, gates, writes, mapped), tokens_of_row)
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
        backend: str = "auto",
    ) -> tuple[Tensor, Self]:
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
        per_token = log_decay, key_gate, profile, query_type, write_weight, read_weight
        token = (q_t, k_t, v_t, *per_token)
        repeat = getattr(self.numbers, "repeat", None)  # of a backend that knows the last token
        if repeat is not None and inplace and backend != "torch":
            out = repeat(self, token, self.num_buffers > 1)
            if out is not None:
                return out, self
        q, k, v, *others = map(_one_token, TOKEN, token)
        chosen = choose_backend(backend, v.device, self.dtype, v.dtype)
        state = self if inplace else self.fork()
        _warn_past_horizon(state, 1)
        inputs = Inputs(q, k, v, Gates(*others[:2]), Routing(*others[2:]))
        out = chosen.step(state, inputs, inplace and state.num_buffers > 1)
        return out.to(v.dtype), state

    @isolated
    def extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None = None,
        inplace: bool = False,
        **per_token: Tensor | None,
    ) -> tuple[Tensor, Self]:
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
        gates, routing = sort_per_token("extend", per_token)
        check.check_qkv(q, k, v)
        lengths, padding = [k.shape[1]] * len(k), None
        if attention_mask is not None:
            check.check_gates_and_routing(q, k, v, gates, routing)
            check.check_padding(attention_mask, k.shape[:2], k.device)
            padding = Padding(attention_mask)
            q, k, v, gates, routing = padding.remove_all(q, k, v, gates, routing)
            lengths = attention_mask.bool().sum(1).tolist()
        tokens = load_tokens(self, q, k, v, gates, routing)
        state = self if inplace else self.fork()
        _warn_past_horizon(state, max(lengths, default=0))
        y = extend_tokens(state, tokens, lengths, spread=inplace and state.num_buffers > 1)
        assert y is not None
        out = divide(y, state.spec.normalize).to(v.dtype)
        return out if padding is None else padding.restore(out), state

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
    ) -> Self:
        """Read a state that ``save`` wrote; the next steps are those of the saved one, bit for bit.

        A mask that is given must be the state's own. A state with a feature map of the caller's
        needs it again.
        """
        return load_state(cls, path, mask, feature_map, device)


def _warn_past_horizon(state: StateTables, num_tokens: int) -> None:
    """Say, once for a mask, that its boundary now stays where the horizon put it."""
    mask = state.mask
    if mask.boundary.horizon_free or mask.vc_dim == 1:
        return
    if max((cohort.position for cohort in state.cohorts), default=0) + num_tokens > mask.seq_len:
        _warn_kept(mask)


@cache
def _warn_kept(mask: SMatMask) -> None:
    warnings.warn(
        f"decoding past T = {mask.seq_len}: the boundary is kept at n = {mask.num_distant}, and "
        "every later key is recent. A stepped window, boundary=window(step), has no horizon.",
        SMatWarning,
        stacklevel=6,  # past the layers between this function and the caller of the step
    )


def _one_token(name: str, x: Tensor | None) -> Any:
    if x is None and name not in TOKEN[:3]:
        return None
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.ndim < 2:
        raise ValueError(f"{name} must be (batch, heads, ...), got {tuple(x.shape)}")
    return x.unsqueeze(1)
