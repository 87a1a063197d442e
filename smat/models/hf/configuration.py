"""What a language model is made of: sizes, and a mixer for every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from smat.models.block import NORMS
from smat.models.mixers import MIXERS, schedule_of

GATED = {"conv_size": 4, "qk_norm": True, "decay_gate": True, "output_gate": True}
# What a mixer of a language model has unless told: a window without horizon where it can choose,
# and hashes that do not depend on the process that drew the weights.
DEFAULTS: dict[str, dict[str, Any]] = {
    "smat": {"vc_dim": 3, "boundary": "window_8", "seed": 0, **GATED, "output_norm": True},
    "smat_schedule": {"vc_dim": 3, "boundary": "window_8", "seed": 0},
    "mamba2_smat": {"vc_dim": 3, "boundary": "window_8", "settings": "default"},
    "gated_deltanet_smat": {"vc_dim": 3, "settings": "default"},
    "mixture_of_memories": {"vc_dim": 2, "count_types": False},
}
NEEDS_A_SEED = ("smat_hashed",)  # whose hash is drawn with the weights


@dataclass(frozen=True)
class TextShape:
    """What mixers must know of a language model's text: `smat.models.mixers.SequenceTask`."""

    vocab_size: int
    train_length: int
    payload_dim: int = 0
    keys_per_query: int = 1

    @property
    def num_outputs(self) -> int:
        return self.vocab_size

    @property
    def max_length(self) -> int:
        return self.train_length

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.train_length,)


class SMatConfig(PreTrainedConfig):
    """The configuration of `SMatForCausalLM`.

    >>> config = SMatConfig(num_hidden_layers=3, mixers=["mamba2_smat", {"mixer": "softmax"}])
    >>> [spec["mixer"] for spec in config.layer_mixers()]
    ['mamba2_smat', 'softmax', 'mamba2_smat']
    >>> config.mixers[0]["boundary"]
    'window_8'

    Args:
        vocab_size, hidden_size, num_hidden_layers: Sizes.
        mixers: A pattern that is repeated over the layers: names of `smat.models.mixers`, or
            mappings {"mixer": name, option: value, ...} with the options of that mixer. Saved are
            all options that a language model sets, so that new defaults do not change old models.
        context_length: The length that fixes geometries, and boundaries that are named by a part
            of it ("window_8" advances by an eighth). Only "kept" and "rebuilt" mean a horizon.
        mlp_ratio: The width of an MLP behind every mixer, in units of hidden_size; 0 for none.
        norm, norm_eps: "rms" or "layer".
        tie_word_embeddings: Read out with the token embedding.
        initializer_range: The deviation of embeddings; mixers draw theirs as they always do.
        balance_weight: What the balance losses of learned routings count in training.
    """

    model_type = "smat"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    vocab_size: int = 50257
    hidden_size: int = 384
    num_hidden_layers: int = 8
    mixers: list[Any] = field(default_factory=lambda: ["smat"])
    context_length: int = 2048
    mlp_ratio: float = 0.0
    norm: str = "rms"
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02
    balance_weight: float = 0.01
    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def __post_init__(self, **others: Any) -> None:
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "context_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {self.norm!r}")
        if isinstance(self.mixers, str | Mapping):
            self.mixers = [self.mixers]
        self.mixers = [_whole_spec(each) for each in self.mixers]
        if not self.mixers:
            raise ValueError("mixers must name at least one mixer, got none")
        boundaries = [spec["boundary"] for spec in self.mixers if spec.get("boundary")]
        if any(schedule_of(each, self.context_length) is None for each in boundaries):
            self.use_cache = False  # half of every length is distant: nothing to go on from
        super().__post_init__(**others)

    def layer_mixers(self) -> list[dict[str, Any]]:
        """Return the mixer of every layer, with its options."""
        count = len(self.mixers)
        return [self.mixers[index % count] for index in range(self.num_hidden_layers)]

    @property
    def text_shape(self) -> TextShape:
        """What mixers must know of the text."""
        return TextShape(self.vocab_size, self.context_length)


def _whole_spec(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """Write a mixer out with the options that a language model sets."""
    given = {"mixer": spec} if isinstance(spec, str) else dict(spec)
    name = given.get("mixer")
    if name not in MIXERS:
        raise ValueError(f"mixers must be of {', '.join(MIXERS)}, got {spec!r}")
    if name in NEEDS_A_SEED:
        raise ValueError(f"{name} is for recall tasks; take 'smat' with routing = 'hashed'")
    return {"mixer": name, **DEFAULTS.get(name, {}), **given}
