"""The mixers that experiments inject, by name, and how each is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from smat.geometry import Geometry
from smat.layers import (
    DeltaNet,
    DirectedRouting,
    GatedDeltaNet,
    HashedRouting,
    LogLinearGatedDeltaNet,
    LogLinearMamba2,
    Mamba2,
    MixtureOfMemories,
    ProfileMemory,
    SMatAttention,
    SoftmaxAttention,
    TransportedMemory,
    kept_mask,
)
from smat.masks import boundary

if TYPE_CHECKING:
    from smat.models.config import ModelConfig


def make_mixer(config: ModelConfig, task: Any) -> nn.Module:
    """Make one mixer layer of a model.

    >>> from smat.models import ModelConfig
    >>> from smat.tasks import MQAR
    >>> make_mixer(ModelConfig("deltanet", width=32, options={"num_heads": 2}), MQAR()).num_heads
    2
    """
    if config.mixer not in MIXERS:
        raise ValueError(f"mixer must be one of {', '.join(MIXERS)}, got {config.mixer!r}")
    return MIXERS[config.mixer](config.width, task, dict(config.options))


def call_mixer(
    mixer: nn.Module, x: Tensor, rows: Tensor | None, inputs: dict[str, Tensor]
) -> Tensor:
    """Mix tokens and return the output everywhere, or at rows (B, R) alone.

    Where all examples ask at the same rows, SMat-Attention reads nothing else.
    """
    extras: dict[str, Any] = {}
    if isinstance(mixer, SMatAttention) and isinstance(mixer.routing, HashedRouting):
        extras["token_ids"] = inputs["token_ids"]
    if rows is None:
        return mixer(x, **extras)[0]
    if isinstance(mixer, SMatAttention) and bool((rows == rows[0]).all()):
        return mixer(x, positions=rows[0], **extras)[0]
    out = mixer(x, **extras)[0]
    return out.gather(1, rows[..., None].expand(-1, -1, out.shape[-1]))


def _hashed(width: int, task: Any, options: dict[str, Any]) -> SMatAttention:
    """Route by a hash of token ids: a payload is filed under the token before it."""
    heads = options.get("num_heads", 4)
    hashed = {"write_lag": 1, "seed": options.pop("hash_seed", 0)}
    routing: HashedRouting
    if options.pop("learned_direction", False):
        geometry = Geometry.for_distant(task.num_distant, options["vc_dim"])
        routing = DirectedRouting(
            width, geometry, vocab_size=task.vocab_size, num_heads=heads, **hashed
        )
    else:
        point_read = options.pop("point_read", False)
        routing = HashedRouting(
            task.vocab_size, heads, num_keys=task.num_keys, point_read=point_read, **hashed
        )
    return SMatAttention(width, horizon=task.max_length, routing=routing, **options)


def _scheduled(width: int, task: Any, options: dict[str, Any]) -> SMatAttention:
    """Route by the hash of token ids under a boundary schedule, in the geometry of training."""
    name, train = options.pop("boundary"), task.seq_len
    routing = HashedRouting(task.vocab_size, options.get("num_heads", 4), write_lag=1)
    field_size = Geometry.for_distant(train // 2, options.get("vc_dim", 2)).field_size
    schedules = {
        "none": boundary.none(),
        "kept": boundary.kept(train // 2),
        "rebuilt": None,  # half of every length; at the training length it is `kept`
        "doubling": boundary.doubling(),
        "window_8": boundary.window(train // 8),
        "window_4": boundary.window(train // 4),
    }
    return SMatAttention(
        width, routing=routing, field_size=field_size, boundary=schedules[name],
        horizon=None if name == "rebuilt" else train, **options,
    )  # fmt: skip


def _linear(width: int, task: Any, options: dict[str, Any]) -> SMatAttention:
    return SMatAttention(width, vc_dim=1, horizon=task.max_length, **options)


def _with_memory(
    backbone: type[Mamba2] | type[GatedDeltaNet],
    memory: type[ProfileMemory] | type[TransportedMemory],
) -> Callable[[int, Any, dict[str, Any]], nn.Module]:
    """Return a maker of a backbone with learned routing, a geometry for each length."""

    def make(width: int, task: Any, options: dict[str, Any]) -> nn.Module:
        heads = options.get("num_heads")
        if heads is None:
            heads = options.get("expand", 2) * width // options.get("head_dim", 64)
        made = memory.for_lengths(
            width, heads, vc_dim=options.pop("vc_dim"), lengths=task.lengths,
            num_reads=options.pop("num_reads", 4),
        )  # fmt: skip
        return backbone(width, memory=made, **options)

    return make


def _mixture(width: int, task: Any, options: dict[str, Any]) -> nn.Module:
    """Return a mixture with as many memories as SMat has profiles, or profiles and types."""
    vc_dim, count_types = options.pop("vc_dim"), options.pop("count_types")
    counts = {}
    for length in task.lengths:
        geometry = kept_mask(length, vc_dim).geometry
        counts[length] = geometry.num_profiles + count_types * geometry.num_types
    return MixtureOfMemories(width, counts, **options)


def _plain(kind: type[nn.Module]) -> Callable[[int, Any, dict[str, Any]], nn.Module]:
    return lambda width, task, options: kind(width, **options)


MIXERS: dict[str, Callable[[int, Any, dict[str, Any]], nn.Module]] = {
    "softmax": _plain(SoftmaxAttention),
    "mamba2": _plain(Mamba2),
    "deltanet": _plain(DeltaNet),
    "gated_deltanet": _plain(GatedDeltaNet),
    "mamba2_log_linear": _plain(LogLinearMamba2),
    "gated_deltanet_log_linear": _plain(LogLinearGatedDeltaNet),
    "linear": _linear,
    "smat_hashed": _hashed,
    "smat_schedule": _scheduled,
    "mamba2_smat": _with_memory(Mamba2, ProfileMemory),
    "mixture_of_memories": _mixture,
    "gated_deltanet_smat": _with_memory(GatedDeltaNet, TransportedMemory),
}
