"""What the benchmarks of whole models are to time: routing models, and language models."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import model_validator

from smat.bench.config import BUDGET, BenchConfig, Count, Counts, option, unrecorded

# A model of the cost table: how the paper's table calls it, what it is called here, its mixer.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"smat_d{d}": (f"SMat (d = {d})", {"mixer": "smat", "vc_dim": d}) for d in (1, 2, 3, 4)},
    **{
        f"gated_smat_d{d}": (f"Gated SMat (d = {d})", {"mixer": "smat", "vc_dim": d, "gated": True})
        for d in (2, 3)
    },
    "softmax": ("Softmax", {"mixer": "softmax"}),
    "mamba2": ("Mamba-2", {"mixer": "mamba2"}),
    "deltanet": ("DeltaNet", {"mixer": "deltanet"}),
    "gated_deltanet": ("Gated DeltaNet", {"mixer": "gated_deltanet"}),
    "log_linear": ("Log-Linear", {"mixer": "log_linear"}),
}
YARDSTICK = "smat_d1"
LENGTHS = {"train_len": (16384, 65536), "prefill_len": (65536, 262144), "context": 262144}
COST_PRESETS: dict[str | None, dict[str, Any]] = {
    "quick": {"train_len": (1024, 4096), "prefill_len": (4096,), "context": 4096, "repeats": 3},
    "cpu": {**LENGTHS, "softmax_up_to": 65536},
    "paper": {**LENGTHS, "batch": 64, "repeats": 11, "budget": 120.0},
}


class ModelsConfig(BenchConfig):
    """Time the subset-routing models, the paper's table of costs: training, prefill, one token.

    A training step is forward, backward and Adam. Prefill leaves the state behind. Ratios are to
    SMat with d = 1 in the same turns. Peak: beyond weights and inputs, at the longest length, in
    a process of its own. Cache: what decoding keeps at the context.
    """

    preset: Literal["quick", "cpu", "paper"] | None = unrecorded(
        None,
        "Fill in what is not given. quick: a minute. cpu: the paper's lengths with one sequence, "
        "softmax up to 64K, within 20 minutes on two cores. paper: batch 64 as well, for a GPU.",
    )
    models: tuple[str, ...] = option(
        tuple(MODELS), "Model, as the record names it; may be repeated; d = 1 always is.", "model"
    )
    train_lens: Counts = option((1024, 4096), "Length of a training step.", "train_len")
    prefill_lens: Counts = option((4096,), "Length of prefill.", "prefill_len")
    context: Count = option(4096, "Tokens before the one that is decoded.")
    batch: Count = option(1, "Sequences at once.")
    width: Count = option(64, "Width of the model.")
    head_dim: Count = option(32, "Width of queries, keys and values.")
    chunk_size: Count = option(64, "Chunk width c of the masks.")
    steps: Count = option(64, "Tokens to decode.")
    softmax_up_to: int = option(262144, "Longest T at which softmax trains and prefills.")
    repeats: Count = option(5, "Runs of each candidate.")
    budget: float = option(20.0, BUDGET)
    memory: bool = option(True, "Measure peak memory in fresh processes.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {**COST_PRESETS.get(given.get("preset"), {}), **given}

    @model_validator(mode="after")
    def _check(self) -> ModelsConfig:
        unknown = [name for name in self.models if name not in MODELS]
        if unknown:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, not {unknown[0]}")
        return self

    @property
    def names(self) -> list[str]:
        """The models in the order of the paper's table, the yardstick among them."""
        return [name for name in MODELS if name in {YARDSTICK, *self.models}]


class ModelSizes(BenchConfig):
    """The sizes of a language model of Mamba-2 with a memory, and its boundary."""

    layers: Count = option(8, "Layers.")
    width: Count = option(384, "Width of the model.")
    head_dim: Count = option(64, "Width of a head, and of its state.")
    vocab_size: Count = option(50257, "Tokens of the vocabulary.")
    vc_dim: Count = option(3, "VC dimension d of the memories.")
    boundary: Literal["kept", "window_8", "window_4", "doubling"] = option(
        "window_8", "Boundary: kept at half of the context, or a window of a part of it."
    )

    context_length: ClassVar[Any]  # the length that fixes the geometry


class StepConfig(ModelSizes):
    """Take one training step of the paper's model of PG-19 on one long text.

    Times are seconds of the processor, all cores together. Peak: the largest resident set of the
    whole process, its libraries and weights included.
    """

    seq_len: Count = option(16384, "Sequence length T.")
    checkpointing: bool = option(False, "Make the activations of layers again in the backward.")

    @property
    def context_length(self) -> int:
        return self.seq_len


class GenerateConfig(ModelSizes):
    """Answer a prompt far past the context for which the geometry was made.

    Times are seconds of the processor a token. Neither they nor the memory may grow.
    """

    layers: Count = option(2, "Layers.")
    width: Count = option(128, "Width of the model.")
    vocab_size: Count = option(256, "Tokens of the vocabulary.")
    context: Count = option(512, "Length that fixes the geometry.")
    prompt: Count = option(1024, "Tokens of the prompt.")
    tokens: Count = option(2000, "Tokens to generate.")
    piece: Count = option(250, "Tokens after which time and memory are read.")

    @property
    def context_length(self) -> int:
        return self.context
