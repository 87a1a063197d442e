"""The mixers that experiments inject: a name, and a function whose arguments are its options.

>>> from smat.tasks import MQAR
>>> make_mixer("deltanet", 32, MQAR(), num_heads=2).num_heads
2

Options are those that a function names, and the arguments of its layer; others raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

import torch

from smat import layers
from smat.geometry import Geometry
from smat.layers.memory.settings import KeyInit
from smat.masks import BoundarySchedule, doubling, kept, none, window
from smat.masks.boundary import schedule_from_dict

Option = bool | int | float | str
BoundaryName = Literal["none", "kept", "rebuilt", "doubling", "window_8", "window_4"]
Boundary = BoundaryName | Mapping[str, Any]  # or `schedule.to_dict()`
RoutingName = Literal["positional", "hashed", "content"]


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


def schedule_of(boundary: Boundary, length: int) -> BoundarySchedule | None:
    """Return the schedule of a name, by the length of training; None is half of every length.

    >>> schedule_of("window_8", 1024), schedule_of({"kind": "kept", "num_distant": 7}, 1024)
    (WindowBoundary(step=128), KeptBoundary(num_distant=7))
    """
    if isinstance(boundary, Mapping):
        found = schedule_from_dict(boundary)
        return found if found.horizon_free else None
    schedules = {
        "none": none(),
        "kept": kept(length // 2),
        "rebuilt": None,  # at the training length it is `kept`
        "doubling": doubling(),
        "window_8": window(max(1, length // 8)),
        "window_4": window(max(1, length // 4)),
    }
    if boundary not in schedules:
        raise ValueError(f"boundary must be one of {', '.join(schedules)}, got {boundary!r}")
    return schedules[boundary]


def _smat(
    width: int,
    task: SequenceTask,
    *,
    boundary: Boundary = "window_8",
    vc_dim: int = 3,
    num_heads: int = 4,
    routing: RoutingName = "positional",
    seed: int | None = None,
    **layer: Any,
) -> layers.Mixer:
    """Attend under a boundary schedule, in the geometry of training; `seed` is that of hashes."""
    length = task.train_length
    geometry, schedule = Geometry.for_distant(length // 2, vc_dim), schedule_of(boundary, length)
    routings: dict[str, Callable[[], layers.Router]] = {
        "positional": layers.PositionalRouting,
        "hashed": lambda: layers.HashedRouting(
            task.vocab_size, num_heads, write_lag=1, seed=hash_seed() if seed is None else seed
        ),
        "content": lambda: layers.ContentRouting(layers.LearnedRouting(width, num_heads, geometry)),
    }
    if routing not in routings:
        raise ValueError(f"routing must be one of {', '.join(routings)}, got {routing!r}")
    return layers.SMatAttention(
        width, vc_dim=vc_dim, num_heads=num_heads, field_size=geometry.field_size,
        routing=routings[routing](), boundary=schedule,
        horizon=None if schedule is None else length, **layer,
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
    request_tokens: int = 1,
    selector: str = "top_types",
    key_init: KeyInit | None = None,
    boundary: Boundary | None = None,
    **layer: Any,
) -> layers.Mixer:
    """Add a memory with learned routing: a geometry for each length, or a boundary schedule."""
    num_heads = expand * width // head_dim
    chosen = _settings(settings, selector_conv, request_tokens)
    if key_init is not None:
        chosen = replace(chosen, key_init=key_init)
    options: dict[str, Any] = {"vc_dim": vc_dim, "settings": chosen, "selector": selector}
    if boundary is None:
        memory = layers.ProfileMemory.for_lengths(width, num_heads, lengths=task.lengths, **options)
    else:
        schedule = schedule_of(boundary, task.train_length)
        memory = layers.ProfileMemory.for_horizon(
            width, num_heads, horizon=task.train_length, boundary=schedule, **options
        )
    return layers.Mamba2(width, head_dim=head_dim, expand=expand, memory=memory, **layer)


def _gated_deltanet_memory(
    width: int,
    task: SequenceTask,
    *,
    vc_dim: int,
    num_heads: int = 4,
    settings: str = "default",
    selector_conv: int = 0,
    request_tokens: int = 1,
    **layer: Any,
) -> layers.Mixer:
    memory = layers.TransportedMemory.for_lengths(
        width, num_heads, vc_dim=vc_dim, lengths=task.lengths,
        settings=_settings(settings, selector_conv, request_tokens),
    )  # fmt: skip
    return layers.GatedDeltaNet(width, num_heads=num_heads, memory=memory, **layer)


def _settings(name: str, selector_conv: int, request_tokens: int) -> layers.MemorySettings:
    """Return the settings of a memory by name, and what is read in a request."""
    named = layers.MemorySettings.named(name)
    return replace(named, selector_conv=selector_conv, request_tokens=request_tokens)


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
    "smat": _smat,
    "smat_hashed": _hashed,
    "smat_schedule": partial(_smat, routing="hashed", vc_dim=2),
    "mamba2_smat": _mamba2_memory,
    "gated_deltanet_smat": _gated_deltanet_memory,
    "mixture_of_memories": _mixture,
}


def make_mixer(name: str, width: int, task: SequenceTask, **options: Any) -> layers.Mixer:
    """Make the mixer of a name, with its options."""
    if name not in MIXERS:
        raise ValueError(f"mixer must be one of {', '.join(MIXERS)}, got {name!r}")
    return MIXERS[name](width, task, **options)
