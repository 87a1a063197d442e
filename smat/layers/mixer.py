"""One protocol for every layer that mixes tokens: forward, step, cache, padding and packing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from smat.distributed import HeadRanks, Share, active_share, open_contexts
from smat.layers.call import CallInfo, LayerCaches, MixerCache
from smat.machine import guard_bfloat16
from smat.ops.smat.arguments import check_device, check_padding, check_positions, check_tensor
from smat.ops.smat.padding import Padding


class Mixer(nn.Module, ABC):
    """A layer that mixes tokens: (B, T, hidden_size) -> (B, T, hidden_size), causally.

    Subclasses write `mix`, which meets real tokens in front and padding only behind them.
    """

    hidden_size: int
    extra_inputs: tuple[str, ...] = ()  # what `forward` takes beside hidden states: "token_ids"
    packs_natively = False  # whether `mix` takes packed sequences as they are
    reads_at_queries = False  # whether `mix` computes outputs at ``call.queries`` alone
    packs_over_ranks = False  # whether it does so where ranks hold the sequences together

    def __init__(self, layer_idx: int | None = None) -> None:
        super().__init__()
        self.layer_idx = layer_idx  # its place in a cache that layers share
        self.ranks: HeadRanks | None = None  # that share its heads

    @abstractmethod
    def mix(self, x: Tensor, call: CallInfo) -> tuple[Tensor, MixerCache | None]:
        """Mix the tokens of a call, and return its cache if ``call.use_cache``."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: MixerCache | LayerCaches | None = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        inplace: bool = False,
        **extras: Any,
    ) -> tuple[Tensor, None, Any]:
        """Mix tokens, and return ``(out, None, cache)``; the cache is None unless asked for.

        Args:
            hidden_states: (B, T, hidden_size).
            attention_mask: (B, T) or longer, of which the last T columns count; 0 for padding on
                either side. Each row gives what its real tokens alone would give; padding gives 0.
            past_key_values: The cache after the tokens before these. It carries no gradient, so
                that the output of such a call has none: differentiating it raises. `LayerCaches`
                are shared by the layers of a model: this one uses the place of its `layer_idx`.
            use_cache: Return the cache after these tokens, or put it into the shared one.
            output_attentions: Taken as other libraries' layers do; there are none to return.
            positions: (R,) tokens of this call at which the output is wanted, (B, R, hidden_size).
            cu_seqlens: (S + 1,) edges of sequences packed along T, B = 1; each gives what it would
                give alone, and is a row of the cache.
            inplace: Let states of the given cache be overwritten, which saves copying them.
            extras: What this layer takes beside hidden states, by the names of `extra_inputs`.
        """
        if output_attentions:
            raise ValueError(f"{type(self).__name__} has no attention weights to return")
        if isinstance(past_key_values, LayerCaches):
            own = past_key_values.get(self._place())
            given: dict[str, Any] = {"positions": positions, "cu_seqlens": cu_seqlens, **extras}
            out, _, cache = self.forward(
                hidden_states, attention_mask, own, use_cache, inplace=use_cache, **given
            )
            if use_cache:
                past_key_values.put(self._place(), cache, hidden_states.shape[1])
            return out, None, past_key_values
        share = active_share(hidden_states) if open_contexts else None
        self._check(hidden_states, attention_mask, past_key_values, cu_seqlens, extras, share)
        is_narrow = hidden_states.dtype == torch.bfloat16 or torch.is_autocast_enabled("cpu")
        if is_narrow and hidden_states.device.type == "cpu":
            guard_bfloat16()
        if positions is not None:
            check_positions(positions, hidden_states)
        packs = self.packs_natively or (self.packs_over_ranks and share is not None)
        if cu_seqlens is not None and not packs:
            if share is not None:
                out, cache = self._mix_pieces(hidden_states, cu_seqlens, extras, share), None
            else:
                out, cache = self._mix_unpacked(hidden_states, cu_seqlens, use_cache, extras)
            return out if positions is None else out[:, positions], None, cache
        begins = attention_mask is None and past_key_values is None and not use_cache
        queries = positions if self.reads_at_queries and begins and share is None else None
        batch, length = hidden_states.shape[:2]
        padding = Padding(None if attention_mask is None else attention_mask[:, -length:])
        extras = {
            name: padding.remove(x)[0] if _is_per_token(x, batch, length) else x
            for name, x in extras.items()
        }
        (x,) = padding.remove(hidden_states)
        call = CallInfo(
            batch, length, x.device, None if padding.real is None else padding.front(padding.real),
            cu_seqlens, past_key_values, use_cache, inplace, queries, extras, share,
        )  # fmt: skip
        out, cache = self.mix(self._enter(x), call)
        if queries is None:
            out = padding.restore(out)
            out = out if positions is None else out[:, positions]
        if past_key_values is not None and torch.is_grad_enabled():
            out = _WithoutGradient.apply(out, hidden_states)
        return out, None, cache

    def step(
        self,
        hidden_state: Tensor,
        cache: MixerCache | None = None,
        *,
        inplace: bool = False,
        **extras: Any,
    ) -> tuple[Tensor, MixerCache]:
        """Take one token, (B, hidden_size), after those of the cache; None starts a sequence.

        extras are those of `forward` without their time axis. The cache that was given stays
        valid unless ``inplace``.
        """
        timed: dict[str, Any] = {
            name: x.unsqueeze(1) if isinstance(x, Tensor) else x for name, x in extras.items()
        }
        x = hidden_state.unsqueeze(1)
        out, _, after = self.forward(x, None, cache, True, inplace=inplace, **timed)
        assert after is not None
        return out.squeeze(1), after

    def split_over(self, ranks: HeadRanks) -> None:
        """Keep the heads of this rank alone: `smat.tensor_parallel`."""
        self.cut_heads(ranks)
        self.ranks = ranks

    def cut_heads(self, ranks: HeadRanks) -> None:
        """Cut parameters and sizes by heads."""
        raise ValueError(f"{type(self).__name__} says of no heads how {ranks.size} ranks hold them")

    def reset_parameters(self) -> None:
        """Draw all parameters anew; subclasses add what their modules do not draw themselves."""
        reset_children(self)

    def _place(self) -> int:
        if self.layer_idx is None:
            raise ValueError(
                f"{type(self).__name__} shares a cache, but was made without layer_idx"
            )
        return self.layer_idx

    def _mix_unpacked(
        self, hidden_states: Tensor, cu_seqlens: Tensor, use_cache: bool, extras: Mapping[str, Any]
    ) -> tuple[Tensor, MixerCache | None]:
        """Lay packed sequences side by side, zeros behind each, and mix them as a padded batch."""
        lengths = cu_seqlens.long().diff()

        def unpack(x: Tensor) -> Tensor:
            return nn.utils.rnn.pad_sequence(x[0].split(lengths.tolist()), batch_first=True)

        sequences, total = unpack(hidden_states), hidden_states.shape[1]
        apart: dict[str, Any] = {
            name: unpack(x) if _is_per_token(x, 1, total) else x for name, x in extras.items()
        }
        real = torch.arange(sequences.shape[1], device=sequences.device) < lengths[:, None]
        out, _, cache = self.forward(sequences, real, None, use_cache, **apart)
        return out[real].unsqueeze(0), cache

    def _mix_pieces(
        self, x: Tensor, cu_seqlens: Tensor, extras: Mapping[str, Any], share: Share
    ) -> Tensor:
        """Lay what this rank holds of packed sequences side by side, and mix them as rows."""
        rows = tuple(share.pieces(cu_seqlens.tolist()))

        def unpack(x: Any) -> Any:
            parts = [x[0, each.start : each.stop] for each in rows]
            return nn.utils.rnn.pad_sequence(parts, batch_first=True)

        apart = {
            name: unpack(each) if _is_per_token(each, 1, x.shape[1]) else each
            for name, each in extras.items()
        }
        lengths = torch.tensor([each.stop - each.start for each in rows], device=x.device)
        real = torch.arange(int(lengths.max()), device=x.device) < lengths[:, None]
        call = CallInfo(
            len(rows), real.shape[1], x.device, real if len(rows) > 1 else None, extras=apart,
            share=share, rows=rows,
        )  # fmt: skip
        return self.mix(self._enter(unpack(x)), call)[0][real].unsqueeze(0)

    def _enter(self, x: Tensor) -> Tensor:
        return x if self.ranks is None else self.ranks.enter(x)

    def _check(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        past: MixerCache | None,
        cu_seqlens: Tensor | None,
        extras: Mapping[str, Any],
        share: Share | None = None,
    ) -> None:
        """Refuse tokens, padding, packing and a cache that do not belong together."""
        unknown = [name for name in extras if name not in self.extra_inputs]
        if unknown:
            known = f"takes {list(self.extra_inputs)} beside the arguments of every mixer"
            raise TypeError(f"{type(self).__name__} {known}, got {unknown}")
        for argument, x, kinds in (
            ("hidden_states", hidden_states, Tensor), ("cu_seqlens", cu_seqlens, Tensor | None),
            ("attention_mask", attention_mask, Tensor | None),
            ("past_key_values", past, MixerCache | LayerCaches | None),
        ):  # fmt: skip
            if not isinstance(x, kinds):
                raise TypeError(f"{argument} must be a {kinds}, got {type(x).__name__}")
        shape = tuple(hidden_states.shape)
        if len(shape) != 3 or shape[1] < 1 or shape[2] != self.hidden_size:
            wanted = f"(B, T, {self.hidden_size}) with T >= 1"
            raise ValueError(f"hidden_states must be {wanted}, got {shape}")
        check_tensor("hidden_states", hidden_states, "floating-point")
        own = next(self.parameters()).device
        tensors = {"hidden_states": hidden_states, "cu_seqlens": cu_seqlens, **extras}
        for argument, each in tensors.items():
            if isinstance(each, Tensor):
                check_device(argument, each, own, "the layer is")
        if attention_mask is not None:
            wide = tuple(attention_mask.shape)
            if len(wide) != 2 or wide[1] < shape[1]:
                raise ValueError(f"attention_mask must be (B, T) = {shape[:2]}, got {wide}")
            check_padding(attention_mask[:, -shape[1] :], shape[:2], own)
        if past is not None and len(past) != shape[0]:
            rows = f"past_key_values has {len(past)} rows"
            raise ValueError(f"{rows}, but hidden_states has {shape[0]} sequences")
        if share is not None and (attention_mask is not None or past is not None):
            what = "pads no rows: pack them" if past is None else "decodes after no cache"
            raise ValueError(f"a sequence over {share.size} ranks {what}")
        if cu_seqlens is None:
            return
        check_tensor("cu_seqlens", cu_seqlens, "integers")
        if attention_mask is not None or past is not None:
            raise ValueError("cu_seqlens goes with neither an attention_mask nor a cache")
        edges = cu_seqlens.tolist()
        total = shape[1] if share is None else share.total
        if shape[0] != 1 or edges[:1] != [0] or edges[-1] != total or sorted(edges) != edges:
            rule = f"cu_seqlens must rise from 0 to T = {total} in a batch of 1"
            raise ValueError(f"{rule}, got {edges} for {shape[:2]}")


class _WithoutGradient(torch.autograd.Function):
    """Pass an output on, and refuse to differentiate it."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, hidden_states: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise RuntimeError(
            "a cache carries no gradient, so what was computed after one cannot be differentiated; "
            "call the layer on the whole sequence, or under torch.no_grad()"
        )


def reset_children(module: nn.Module) -> None:
    """Reset the parameters of all modules inside that know how to."""
    for child in module.children():
        reset = getattr(child, "reset_parameters", None)
        if callable(reset):
            reset()
        else:
            reset_children(child)


def _is_per_token(x: object, batch: int, length: int) -> bool:
    return isinstance(x, Tensor) and x.ndim >= 2 and tuple(x.shape[:2]) == (batch, length)
