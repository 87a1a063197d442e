"""The states of all layers as a transformers Cache: reorder, repeat and select, but no crop."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from smat.layers import LayerCaches, MixerCache


class SMatCacheLayer(CacheLayerMixin):
    """The state of one layer, a `MixerCache`; None before its first token."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    @property
    def batch_size(self) -> int:
        """The number of sequences, -1 before the first token."""
        return -1 if self.state is None else len(self.state)

    def store(self, state: MixerCache, num_new: int) -> None:
        """Keep the state after `num_new` tokens, padding included."""
        self.state, self.is_initialized = state, True
        self.length += num_new

    def get_seq_length(self) -> int:
        """Return how many tokens were taken in, padding included."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state: MixerCache | None = None
        self.length, self.is_initialized = 0, False

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order."""
        if self.state is not None:
            self.state = self.state.select(rows)

    reorder_cache = batch_select_indices = select

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence, copies side by side."""
        if self.state is not None:
            self.select(torch.arange(len(self.state)).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens out again: they are summed up in states."""
        if tokens_to_remove:
            raise NotImplementedError(
                f"cannot remove {abs(tokens_to_remove)} of {self.length} tokens: a recurrent state "
                "is a sum over all of them; keep a copy.deepcopy of the cache to go back to"
            )

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("this cache holds the states of smat's mixers; it takes no keys and values")

    lazy_initialization = update


class SMatCache(Cache, LayerCaches):
    """The states of a model's layers, of fixed size unless a layer is softmax attention.

    >>> from smat.models.hf import SMatConfig
    >>> cache = SMatCache(SMatConfig(num_hidden_layers=3))
    >>> len(cache), cache.get_seq_length()
    (3, 0)

    Every call of the model with it takes tokens in, in place: `copy.deepcopy` keeps a state.
    """

    layers: list[SMatCacheLayer]

    def __init__(self, config: Any) -> None:
        super().__init__(layers=[SMatCacheLayer() for _ in range(config.num_hidden_layers)])

    def get(self, layer_idx: int) -> MixerCache | None:
        return self.layers[layer_idx].state

    def put(self, layer_idx: int, cache: MixerCache, num_new: int) -> None:
        self.layers[layer_idx].store(cache, num_new)
