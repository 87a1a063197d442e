"""What a layer knows of one call, and what it carries to the next: padding, packing, states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from smat.masks import SMatMask
from smat.ops import SMatState, smat_attention, smat_attention_at
from smat.ops.feature_maps import FeatureMap
from smat.ops.smat.routing import Routing

State = TypeVar("State")
SHORT = 64  # tokens of a sequence for which tables of states do not pay


@dataclass(frozen=True)
class MixerCache:
    """What one layer carries from token to token, without gradient: a count, and its states.

    >>> cache = MixerCache(torch.tensor([5, 7]), {"conv": torch.zeros(2, 3, 8)})
    >>> cache.select([1, 1, 0]).num_tokens
    tensor([7, 7, 5])
    """

    num_tokens: Tensor  # (B,)
    states: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        if name not in self.states:
            has = f"past_key_values has the states {list(self.states)}"
            raise ValueError(f"{has}, not {name!r}: it is of another layer")
        return self.states[name]

    def __len__(self) -> int:
        return len(self.num_tokens)

    def select(self, index: Tensor | Sequence[int]) -> MixerCache:
        """Take batch rows, in any order and any number of times: beam search."""
        rows = torch.as_tensor(index, dtype=torch.long, device=self.num_tokens.device)
        states = {name: _select(state, rows) for name, state in self.states.items()}
        return MixerCache(self.num_tokens[rows], states)


class LayerCaches:
    """The caches of all layers of a model, each in the place of its `layer_idx`.

    >>> caches = LayerCaches()
    >>> caches.put(1, MixerCache(torch.tensor([5, 7])), num_new=7)
    >>> caches.get(0), len(caches.get(1))
    (None, 2)

    A layer that is given one takes its own cache out and puts the next one in.
    """

    def __init__(self) -> None:
        self.by_layer: dict[int, MixerCache] = {}

    def get(self, layer_idx: int) -> MixerCache | None:
        """Return the cache of a layer, None before its first token."""
        return self.by_layer.get(layer_idx)

    def put(self, layer_idx: int, cache: MixerCache, num_new: int) -> None:
        """Keep the cache of a layer after `num_new` tokens, padding included."""
        self.by_layer[layer_idx] = cache


def _select(state: Any, rows: Tensor) -> Any:
    if state is None or isinstance(state, SMatMask):  # what all rows share
        return state
    if isinstance(state, Tensor):
        return state[rows]
    if isinstance(state, tuple):  # a named one
        return type(state)(*(_select(each, rows) for each in state))
    return state.select(rows)


@dataclass(frozen=True)
class CallInfo:
    """What a layer knows of one call: which tokens are real, and what came before them.

    >>> CallInfo(2, 3, torch.device("cpu"), past=MixerCache(torch.tensor([5, 7]))).positions()
    tensor([[5, 6, 7],
            [7, 8, 9]])

    Real tokens stand in front, so that a causal layer meets padding only behind all that counts.
    """

    batch: int
    length: int
    device: torch.device
    real: Tensor | None = None  # (B, T), or None for all
    cu_seqlens: Tensor | None = None
    past: MixerCache | None = None
    use_cache: bool = False
    inplace: bool = False
    queries: Tensor | None = None  # (R,) where outputs are wanted, or None for all
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether the call is of whole sequences of one length, after which nothing comes."""
        return self.real is None and self.cu_seqlens is None and not self.use_cache

    @property
    def lengths(self) -> Tensor | None:
        """The number of real tokens of each row, or None if all are."""
        return None if self.real is None else self.real.sum(1)

    @property
    def num_tokens(self) -> Tensor:
        """The number of real tokens that each sequence has after this call, (B,)."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.long().diff()
        new = self.lengths
        if new is None:
            new = torch.full((self.batch,), self.length, device=self.device)
        return new if self.past is None else self.past.num_tokens + new

    def before(self, name: str) -> Any:
        """Return a state that the last call left, None if this one begins the sequences."""
        return None if self.past is None else self.past[name]

    def close(self, gate: Tensor) -> Tensor:
        """Close a gate (B, T, ...) at padding, so that a padded token changes no state."""
        if self.real is None:
            return gate
        return gate.masked_fill(~self.real.view(*self.real.shape, *[1] * (gate.ndim - 2)), 0)

    def positions(self) -> Tensor:
        """Count the tokens before each one in its own sequence, (B, T) or (1, T)."""
        token = torch.arange(self.length, device=self.device).unsqueeze(0)
        if self.cu_seqlens is not None:
            edges = self.cu_seqlens.long()
            return token - edges[:-1].repeat_interleave(edges.diff())
        return token if self.past is None else self.past.num_tokens.unsqueeze(1) + token

    def first_visible(self, mask: SMatMask | None = None) -> Tensor | None:
        """Return the first token that each may look back to, or None if nothing limits it.

        The start of its sequence, or its boundary under `mask`; counted from the first token of
        this call, so that a token of an earlier call has a negative number.
        """
        if mask is None and self.cu_seqlens is None:
            return None
        positions = self.positions()
        first = torch.arange(self.length, device=self.device) - positions
        if mask is not None:
            if self.past is None and self.cu_seqlens is None:  # known without looking at tensors
                return first + mask.boundaries(self.length, self.device)
            first = first + mask.boundaries(int(positions.max()) + 1, self.device)[positions]
        return first

    def cache(self, **states: Any) -> MixerCache | None:
        """Collect the states after this call, if they were asked for."""
        return MixerCache(self.num_tokens, states) if self.use_cache else None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SMatMask,
    call: CallInfo,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
    decay_scope: str = "all",
    neighbours: Sequence[Routing] = (),
    **per_token: Tensor | None,
) -> tuple[Tensor, SMatState | None]:
    """Attend from the tokens of a call (B, T, H, .): from the beginning, or after the last state.

    Where only ``call.queries`` are wanted, q and what is read are given for these alone. A hash
    learns from `neighbours` too, unless there is a state before.
    """
    state = call.before("state")
    if state is not None:
        return attend_after(state, q, k, v, call, **per_token)
    given: dict[str, Any] = {
        "feature_map": feature_map, "normalize": normalize, "decay_scope": decay_scope,
        "neighbours": neighbours, **per_token,
    }  # fmt: skip
    return attend_from_start(q, k, v, mask, call, call.use_cache, **given)


def attend_from_start(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SMatMask,
    call: CallInfo,
    keeps_state: bool = False,
    feature_map: FeatureMap = "identity",
    normalize: bool = False,
    neighbours: Sequence[Routing] = (),
    **given: Any,
) -> tuple[Tensor, SMatState | None]:
    """Attend from the tokens of a call that begins sequences, or from its queries alone.

    Short sequences are attended to as a few queries are: the mask, written out, has fewer parts.
    """
    queries = call.queries
    given |= {"feature_map": feature_map, "normalize": normalize, "cu_seqlens": call.cu_seqlens}
    if queries is None and call.length <= SHORT and call.is_whole:
        queries = torch.arange(call.length, device=call.device)
    if queries is not None:
        return smat_attention_at(q, k, v, mask, queries, neighbours=neighbours, **given), None
    out, state = smat_attention(
        q, k, v, mask, attention_mask=call.real, output_final_state=keeps_state, **given
    )
    return with_neighbours(out, neighbours, q, k, v, mask, call, **given), state


def attend_after(
    state: SMatState, q: Tensor, k: Tensor, v: Tensor, call: CallInfo, **per_token: Tensor | None
) -> tuple[Tensor, SMatState]:
    """Attend from new tokens (B, T, H, .) after those of a state, which has no gradient."""
    if call.length == 1 and call.real is None:
        return take_step(partial(state.step, inplace=call.inplace), 0, q, k, v, **per_token)
    return state.extend(q, k, v, attention_mask=call.real, inplace=call.inplace, **per_token)


def with_neighbours(
    out: Tensor,
    neighbours: Iterable[Routing],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: SMatMask,
    call: CallInfo,
    log_decay: Tensor | None = None,
    **given: Any,
) -> Tensor:
    """Add to an output what is read of neighbouring bins: 0, with a gradient for the hash alone."""
    log_decay = None if log_decay is None else log_decay.detach()
    q, k, v = q.detach(), k.detach(), v.detach()
    for each in neighbours:
        given |= {"branch": "long_range", "log_decay": log_decay, **each._asdict()}
        out = out + smat_attention(q, k, v, mask, attention_mask=call.real, **given)[0]
    return out


def take_step(
    step: Callable[..., tuple[Tensor, State]], t: int, *tokens: Tensor, **per_token: Tensor | None
) -> tuple[Tensor, State]:
    """Take token t of what is given per token, (B, T, ...), by a step of decoding: (B, 1, ...)."""
    named = {name: None if x is None else x[:, t] for name, x in per_token.items()}
    out, state = step(*(x[:, t] for x in tokens), **named)
    return out.unsqueeze(1), state
