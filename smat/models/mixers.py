"""The mixers that experiments inject: a name, and a function whose arguments are its options.

>>> from smat.tasks import MQAR
>>> MIXERS["deltanet"](32, MQAR(), num_heads=2).num_heads
2

Options are those that a function names, and the arguments of its layer; others raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import torch

from smat import layers
from smat.geometry import Geometry
from smat.masks import doubling, kept, none, window

Option = bool | int | float | str
BoundaryName = Literal["none", "kept", "rebuilt", "doubling", "window_8", "window_4"]


class SequenceTask(Protocol):
    """What a sequence model must know of its task; `smat.tasks.Task` says what each is."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def payload_dim(self) -> int: ...
    @property
    def num_outputs(self) -> int: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def max_length(self) -> int: ...
    @property
    def train_length(self) -> int: ...
    @property
    def keys_per_query(self) -> int: ...


def _plain(kind: type[layers.Mixer], width: int, task: SequenceTask, **layer: Any) -> layers.Mixer:
    return kind(width, **layer)


def _linear(width: int, task: SequenceTask, **layer: Any) -> layers.Mixer:
    return layers.SMatAttention(width, vc_dim=1, horizon=task.max_length, **layer)


def hash_seed() -> int:
    """Return the seed of hash tables: that of the weights, so that every run has its own tables.

    >>> torch.manual_seed(7) and hash_seed()
    7
    """
    return torch.initial_seed() % (1 << 62)


def _hashed(
    width: int,
    task: SequenceTask,
    *,
    vc_dim: int = 3,
    num_heads: int = 4,
    learned_direction: bool = False,
    point_read: bool = False,
    **layer: Any,
) -> layers.Mixer:
    """Route by a hash of token ids: a payload is filed under the token before it."""
    routing = layers.HashedRouting(
        task.vocab_size, num_heads, write_lag=1, num_keys=task.keys_per_query,
        point_read=point_read, seed=hash_seed(),
    )  # fmt: skip
    if learned_direction:
        geometry = Geometry.for_distant(task.max_length // 2, vc_dim)
        routing = layers.DirectedRouting(
            width, geometry, vocab_size=task.vocab_size, num_heads=num_heads, write_lag=1,
            seed=hash_seed(),
        )  # fmt: skip
    return layers.SMatAttention(
        width, vc_dim=vc_dim, num_heads=num_heads, horizon=task.max_length, routing=routing, **layer
    )


def _scheduled(
    width: int,
    task: SequenceTask,
    *,
    boundary: BoundaryName,
    vc_dim: int = 2,
    num_heads: int = 4,
    **layer: Any,
) -> layers.Mixer:
    """Route by the hash of token ids under a boundary schedule, in the geometry of training."""
    length = task.train_length
    schedules = {
        "none": none(),
        "kept": kept(length // 2),
        "rebuilt": None,  # half of every length; at the training length it is `kept`
        "doubling": doubling(),
        "window_8": window(length // 8),
        "window_4": window(length // 4),
    }
    routing = layers.HashedRouting(task.vocab_size, num_heads, write_lag=1, seed=hash_seed())
    field_size = Geometry.for_distant(length // 2, vc_dim).field_size
    return layers.SMatAttention(
        width, vc_dim=vc_dim, num_heads=num_heads, field_size=field_size, routing=routing,
        boundary=schedules[boundary], horizon=None if boundary == "rebuilt" else length, **layer,
    )  # fmt: skip


def _mamba2_memory(
    width: int,
    task: SequenceTask,
    *,
    vc_dim: int,
    head_dim: int = 64,
    expand: int = 2,
    settings: str = "default",
    selector_conv: int = 0,
    selector: str = "top_types",
    **layer: Any,
) -> layers.Mixer:
    """Add a memory with learned routing, and a geometry for each length."""
    memory = layers.ProfileMemory.for_lengths(
        width, expand * width // head_dim, vc_dim=vc_dim, lengths=task.lengths,
        settings=_settings(settings, selector_conv), selector=selector,
    )  # fmt: skip
    return layers.Mamba2(width, head_dim=head_dim, expand=expand, memory=memory, **layer)


def _gated_deltanet_memory(
    width: int,
    task: SequenceTask,
    *,
    vc_dim: int,
    num_heads: int = 4,
    settings: str = "default",
    selector_conv: int = 0,
    **layer: Any,
) -> layers.Mixer:
    memory = layers.TransportedMemory.for_lengths(
        width, num_heads, vc_dim=vc_dim, lengths=task.lengths,
        settings=_settings(settings, selector_conv),
    )  # fmt: skip
    return layers.GatedDeltaNet(width, num_heads=num_heads, memory=memory, **layer)


def _settings(name: str, selector_conv: int) -> layers.MemorySettings:
    """Return the settings of a memory: "default" learns, "paper" is what the paper's text says."""
    return replace(layers.MemorySettings.named(name), selector_conv=selector_conv)


def _mixture(
    width: int, task: SequenceTask, *, vc_dim: int, count_types: bool, **layer: Any
) -> layers.Mixer:
    """Return a mixture with as many memories as SMat has profiles, or profiles and types."""
    geometries = {each: layers.kept_mask(each, vc_dim).geometry for each in task.lengths}
    counts = {n: x.num_profiles + count_types * x.num_types for n, x in geometries.items()}
    return layers.MixtureOfMemories(width, counts, **layer)


MIXERS: dict[str, Callable[..., layers.Mixer]] = {
    "softmax": partial(_plain, layers.SoftmaxAttention),
    "mamba2": partial(_plain, layers.Mamba2),
    "deltanet": partial(_plain, layers.DeltaNet),
    "gated_deltanet": partial(_plain, layers.GatedDeltaNet),
    "mamba2_log_linear": partial(_plain, layers.LogLinearMamba2),
    "gated_deltanet_log_linear": partial(_plain, layers.LogLinearGatedDeltaNet),
    "linear": _linear,
    "smat_hashed": _hashed,
    "smat_schedule": _scheduled,
    "mamba2_smat": _mamba2_memory,
    "gated_deltanet_smat": _gated_deltanet_memory,
    "mixture_of_memories": _mixture,
}
