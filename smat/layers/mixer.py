"""One protocol for every layer that mixes tokens: forward, step, cache, padding and packing."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from smat.layers.span import MixerCache, Span
from smat.masks import SMatMask
from smat.ops.padding import Padding


class DistantMemory(Protocol):
    """A memory of distant tokens beside a recurrence that forgets them at the boundary.

    A backbone with a memory resets its state and its short convolution at the boundary of `mask`,
    and adds what the memory returns to the local output, before its norm and output projection.
    The boundary of `mask` needs no horizon: it is kept(n), or moves by position alone. A call may
    name another mask, ``mask=``, as long as it begins its sequences; a memory with a method
    `mask_of(span)` has the last word.
    """

    mask: SMatMask

    def __call__(
        self,
        hidden_states: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        beta: Tensor | None,
        span: Span,
    ) -> tuple[Tensor, Any]:
        """Return what recent tokens read, (B, T, H, V), 0 for the others, and the state.

        q, k (B, T, H, K) and v (B, T, H, V) are the backbone's, after convolution and norm; for
        Mamba-2 v is the step times x and beta is None. ``span.part("memory")`` is the state after
        the tokens before these, None at the start.
        """


@runtime_checkable
class AdditiveMemory(DistantMemory, Protocol):
    """A memory whose reads are the long-range branch of the backbone's own linear attention.

    One call of `smat_attention` then serves both branches, which share q, k, v and the decay.
    """

    def assign(self, hidden_states: Tensor, span: Span) -> dict[str, Any]:
        """Return the mask and routing of new sequences, as arguments of `smat_attention`."""


def local_mask(memory: DistantMemory, span: Span) -> SMatMask:
    """Return the plain causal mask, cut at the boundary, of the recurrence beside a memory."""
    if span.past is not None:
        return span.part("mask")
    picks = getattr(memory, "mask_of", None)
    return _local_mask(span.extras.get("mask", memory.mask) if picks is None else picks(span))


@lru_cache(maxsize=64)
def _local_mask(mask: SMatMask) -> SMatMask:
    if not mask.boundary.horizon_free:
        raise ValueError(
            f"a memory beside a recurrence needs a boundary without horizon, such as "
            f"kept({mask.num_distant}), got {mask.describe()}"
        )
    return SMatMask(mask.seq_len, 1, mask.chunk_size, boundary=mask.boundary)


class Mixer(nn.Module, ABC):
    """A layer that mixes tokens: (B, T, hidden_size) -> (B, T, hidden_size), causally.

    Subclasses write `mix`, which meets real tokens in front and padding only behind them.
    """

    packs_natively = False  # whether `mix` takes packed sequences as they are

    @abstractmethod
    def mix(self, x: Tensor, span: Span) -> tuple[Tensor, MixerCache | None]:
        """Mix the tokens of a span, and return its cache if ``span.use_cache``."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: MixerCache | None = None,
        use_cache: bool = False,
        *,
        cu_seqlens: Tensor | None = None,
        inplace: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None, MixerCache | None]:
        """Mix tokens, and return ``(out, None, cache)``; the cache is None unless asked for.

        Args:
            hidden_states: (B, T, hidden_size).
            attention_mask: (B, T) or longer, of which the last T columns count; 0 for padding on
                either side. Each row gives what its real tokens alone would give; padding gives 0.
            past_key_values: The cache after the tokens before these.
            use_cache: Return the cache after these tokens.
            cu_seqlens: (S + 1,) edges of sequences packed along T, B = 1; each gives what it would
                give alone, and is a row of the cache.
            inplace: Let states of the given cache be overwritten, which saves copying them.
            kwargs: What a layer needs beside hidden states, such as token_ids (B, T).
        """
        check_tokens(hidden_states, attention_mask, past_key_values, cu_seqlens)
        if cu_seqlens is not None and not self.packs_natively:
            return self._forward_unpacked(hidden_states, cu_seqlens, use_cache, kwargs)
        batch, length = hidden_states.shape[:2]
        padding = Padding(None if attention_mask is None else attention_mask[:, -length:])
        extras = {name: _front(padding, x, (batch, length)) for name, x in kwargs.items()}
        real = None if padding.real is None else padding.front(padding.real)
        (x,) = padding.remove(hidden_states)
        span = Span(
            batch, length, x.device, real, cu_seqlens, past_key_values, use_cache, inplace, extras
        )
        out, cache = self.mix(x, span)
        return padding.restore(out), None, cache

    def step(
        self,
        hidden_state: Tensor,
        cache: MixerCache | None = None,
        *,
        inplace: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, MixerCache]:
        """Take one token, (B, hidden_size), after those of the cache; None starts a sequence.

        kwargs are those of `forward` without their time axis. The cache that was given stays
        valid unless ``inplace``.
        """
        extras = {
            name: x.unsqueeze(1) if isinstance(x, Tensor) else x for name, x in kwargs.items()
        }
        out, _, after = self.forward(
            hidden_state.unsqueeze(1), None, cache, True, inplace=inplace, **extras
        )
        assert after is not None
        return out.squeeze(1), after

    def reset_parameters(self) -> None:
        """Draw all parameters anew; subclasses add what their parts do not draw themselves."""
        reset_children(self)

    def _forward_unpacked(
        self, hidden_states: Tensor, cu_seqlens: Tensor, use_cache: bool, kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, None, MixerCache | None]:
        length = hidden_states.shape[1]
        edges = cu_seqlens.tolist()
        extras: dict[str, Any] = {
            name: unpack(x, edges) if _per_token(x, (1, length)) else x
            for name, x in kwargs.items()
        }
        rows = unpack(hidden_states, edges)
        lengths = cu_seqlens.long().diff()
        real = torch.arange(rows.shape[1], device=rows.device) < lengths[:, None]
        out, _, cache = self.forward(rows, real, None, use_cache, **extras)
        return out[real].unsqueeze(0), None, cache


def reset_children(module: nn.Module) -> None:
    """Reset the parameters of all parts that know how to."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            reset_children(child)


def unpack(x: Tensor, edges: Sequence[int]) -> Tensor:
    """Lay packed sequences side by side, (1, T, ...) -> (S, longest, ...), zeros behind each.

    >>> unpack(torch.arange(5)[None], [0, 2, 5])
    tensor([[0, 1, 0],
            [2, 3, 4]])
    """
    parts = [x[0, start:stop] for start, stop in itertools.pairwise(edges)]
    return nn.utils.rnn.pad_sequence(parts, batch_first=True)


def check_tokens(
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    past: MixerCache | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Refuse tokens, padding, packing and a cache that do not belong together."""
    shape = tuple(hidden_states.shape)
    if hidden_states.ndim != 3 or shape[1] < 1:
        raise ValueError(f"hidden_states must be (B, T, hidden_size) with T >= 1, got {shape}")
    if attention_mask is not None:
        wide = tuple(attention_mask.shape)
        if len(wide) != 2 or wide[0] != shape[0] or wide[1] < shape[1]:
            raise ValueError(f"attention_mask must be (B, T) = {shape[:2]}, got {wide}")
    if past is not None and len(past) != shape[0]:
        raise ValueError(f"the cache has {len(past)} rows, but there are {shape[0]} sequences")
    if cu_seqlens is None:
        return
    if attention_mask is not None or past is not None:
        raise ValueError("cu_seqlens goes with neither an attention_mask nor a cache")
    edges = cu_seqlens.tolist()
    if shape[0] != 1 or edges[0] != 0 or edges[-1] != shape[1] or sorted(edges) != edges:
        raise ValueError(
            f"cu_seqlens must rise from 0 to T in a batch of 1, got {edges} for {shape[:2]}"
        )


def _per_token(x: Any, shape: tuple[int, int]) -> bool:
    return isinstance(x, Tensor) and x.ndim >= 2 and tuple(x.shape[:2]) == shape


def _front(padding: Padding, x: Any, shape: tuple[int, int]) -> Any:
    return padding.remove(x)[0] if _per_token(x, shape) else x
