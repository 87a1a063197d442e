"""What each benchmark is to time; the fields of a configuration are the options of its command.

A field has one name in the record and may have another on the command line, its alias.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=1)]
Counts = Annotated[tuple[Count, ...], Field(min_length=1)]
Contexts = Annotated[tuple[Annotated[int, Field(ge=8)], ...], Field(min_length=1)]
Schedule = Literal["fixed", "window"]
Preset = Literal["quick", "paper-figure", "paper-gpu", "paper-table", "gates", "window"]
Schedules = Annotated[tuple[Schedule, ...], Field(min_length=1)]
# A field size and a VC dimension; the command line has them as "17,4".
Comma = BeforeValidator(lambda given: given.split(",") if isinstance(given, str) else given)
Case = Annotated[tuple[int, int], Comma]
CONTEXTS = 1024, 4096, 16384, 65536, 262144
CASES = (37, 3), (53, 3), (11, 4), (17, 4), (23, 4), (7, 5), (11, 5)
BUDGET = "Seconds after which a candidate leaves, with 3 runs or more."
# What `--preset` fills in where an option is not given.
PRESETS: dict[str | None, dict[str, Any]] = {
    "quick": {"seq_len": (1024, 2048, 4096), "repeats": 3},
    "paper-figure": {"seq_len": (16384, 32768, 65536, 98304, 131072)},
    # What the paper times on its GPU: the figure's sizes, and those of the table of costs.
    "paper-gpu": {
        "seq_len": (16384, 32768, 65536, 98304, 131072), "heads": 8, "chunk_size": 128,
        "dtype": "bf16", "repeats": 15,
    },
    "paper-table": {
        "seq_len": (65536, 262144), "batch": 64, "heads": 1, "key_dim": 32, "value_dim": 32,
        "both": True, "softmax_up_to": 262144,
    },
    "gates": {"seq_len": (65536,), "both": True, "against": "none"},
    "window": {"seq_len": (32768,), "window_step": (2048,), "against": "none"},
}  # fmt: skip


def option(default: Any, text: str, name: str | None = None, recorded: bool = True) -> Any:
    """Declare a field with its help text; `name` is the option's, where it is another."""
    return Field(default, description=text, validation_alias=name, exclude=not recorded)


unrecorded = partial(option, recorded=False)


class Config(BaseModel):
    """A configuration that does not change, and refuses fields that it does not have.

    >>> LayersConfig(seq_len=128, heads=2).heads
    2
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    def record(self) -> dict[str, Any]:
        """Return the configuration as the JSON record holds it."""
        return self.model_dump(mode="json")


class KernelsConfig(Config):
    """Compile the Triton kernels for devices that are not here, and count the bytes they move.

    Nothing is run or timed. Compiled: registers of a thread, spilled bytes, shared memory of a
    block, and how many blocks a multiprocessor holds at once by its published limits; of several
    forms of a kernel the worst. Bytes: what kernels load and store in a call, of one head, against
    the least: inputs and outputs once, states of 64-token chunks and tables written and read once.
    Estimates follow from them and a device's published rates, torch's operations included.
    """

    devices: tuple[Literal["sm_80", "sm_90", "gfx942"], ...] = option(
        ("sm_80", "sm_90", "gfx942"), "Device to compile for; may be repeated.", "device"
    )
    widths: Counts = option((64, 128), "K = V to compile for; may be repeated.", "width")
    dtypes: tuple[Literal["bf16", "fp16", "fp32"], ...] = option(
        ("bf16", "fp32"), "Type of the inputs; may be repeated.", "dtype"
    )
    compiled: bool = option(True, "Compile the kernels: minutes.", "compile")
    counted: bool = option(True, "Count bytes.", "bytes")
    seq_len: Count = option(65536, "Sequence length T of the bytes.")
    vc_dims: Counts = option((1, 2, 3, 4), "VC dimension d of the bytes.", "vc_dim")


class BenchConfig(Config):
    """What all benchmarks that run something have."""

    device: str = option("cpu", "Device, for example cpu or cuda.")


class TabulateConfig(BenchConfig):
    """Time tabulation: the factored form, Algorithm 2 and the dense product.

    Kept: the bytes of index tables or of the fp32 incidence matrix. Working: the rise of the
    resident set of a fresh process in one run, with input, output and kept tables already there.
    """

    cases: tuple[Case, ...] = option(CASES, "Field size and VC dimension, as 17,4.", "case")
    num_columns: Count = option(2080, "Columns of the table.", "columns")
    repeats: Count = option(5, "Runs of each candidate.")
    budget: float = option(30.0, BUDGET)
    dense_limit: float = unrecorded(700.0, "MB of an incidence matrix above which it is left out.")
    memory: bool = option(True, "Measure peak memory in fresh processes.")

    def record(self) -> dict[str, Any]:
        return {**super().record(), "dense_limit": int(self.dense_limit * 1e6)}


class HeadsConfig(BenchConfig):
    """The sizes of attention."""

    vc_dims: Counts = option((1, 2, 3, 4), "VC dimension d; may be repeated.", "vc_dim")
    heads: Count = option(4, "Heads.")
    key_dim: Count = option(64, "Width of queries and keys.")
    value_dim: Count = option(64, "Width of values.")
    chunk_size: Count = option(64, "Chunk width c of the mask.")
    dtype: Literal["fp64", "fp32", "bf16", "fp16"] = option("fp32", "Type of the inputs.")


class BackendsConfig(HeadsConfig):
    """Time the backends of a device in turns: forward, with the backward pass, decoded tokens.

    Ratio: the torch backend's median over a backend's own, how many times as fast it is. x plain:
    a backend's median with gates over its own without.
    """

    seq_lens: Counts = option((16384,), "Sequence length T; may be repeated.", "seq_len")
    repeats: Count = option(9, "Runs of each candidate.")
    budget: float = option(60.0, BUDGET)


class PrefillConfig(HeadsConfig):
    """Time the op forward, beside causal softmax, d = 1 and a matrix product.

    x d=1: with the same gates. x plain: the same d without gates, boundary fixed. softmax x: how
    many times longer causal softmax takes. Peak extra: resident set of a fresh process beyond
    inputs and outputs; bound: (T^(1-1/d) + T/c) r p + c^2 words a head. Faults: page faults a run.
    """

    backward: ClassVar[bool] = False

    preset: Preset | None = unrecorded(
        None,
        "Fill in what is not given. quick: T = 1K to 4K, 3 runs. paper-figure: T = 16K to 128K; "
        "paper-gpu: the same with the paper's 8 heads in bf16. paper-table: batch 64, fp32. "
        "Without softmax: gates (T = 64K, gated or not) and window (T = 32K, fixed or by 2048).",
    )
    seq_lens: Counts = option((4096, 16384), "Sequence length T; may be repeated.", "seq_len")
    batch: Count = option(1, "Sequences at once.")
    gated: bool = unrecorded(False, "Time the op with decay gates.")
    both: bool = unrecorded(False, "Time it with gates and without.")
    schedules: tuple[Schedule, ...] = unrecorded(
        (), "Boundary: fixed, window, or both.", "schedule"
    )
    steps: tuple[Count, ...] = unrecorded((), "Steps of windows, in tokens (T/16).", "window_step")
    against: Literal["sdpa", "none"] = unrecorded(
        "sdpa", "What to time beside it; sdpa: on a GPU also fla and mamba_ssm, if there."
    )
    softmax_up_to: int = option(131072, "Longest T at which softmax is timed.")
    softmax_heads: Count | None = option(None, "Compare with softmax on fewer heads, both sides.")
    repeats: Count = option(5, "Runs of each candidate.")
    budget: float = option(60.0, BUDGET)
    memory: bool = option(True, "Measure peak memory in fresh processes.")
    gemm_size: Count = option(2048, "Size of the matrix product that is timed beside it.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, given: dict[str, Any]) -> dict[str, Any]:
        filled = PRESETS.get(given.get("preset"), {})
        if cls.backward and given.get("preset") == "paper-table":
            filled = {**filled, "seq_len": (16384, 65536)}
        return {**filled, **given}

    @model_validator(mode="after")
    def _check(self) -> PrefillConfig:
        if (few := self.compared_heads) > self.heads:
            raise ValueError(f"softmax_heads must lie in 1..{self.heads}, but it is {few}")
        if len(set(self.seq_lens)) != len(self.seq_lens):
            raise ValueError(f"each length may be given once, but they are {list(self.seq_lens)}")
        if self.steps and self.schedules and "window" not in self.schedules:
            raise ValueError(f"--window-step {self.steps[0]} needs --schedule window")
        return self

    @property
    def gates(self) -> tuple[bool, ...]:
        """Whether the op is timed without gates, with them, or both."""
        return (False, True) if self.both else (self.gated,)

    @property
    def window_steps(self) -> tuple[int | None, ...]:
        """The windows that are timed; None is the fixed boundary, which always is."""
        if not self.steps and "window" in self.schedules:
            return None, max(1, min(self.seq_lens) // 16)
        return None, *self.steps

    @property
    def compared_heads(self) -> int:
        """The heads with which the op and softmax are compared."""
        return self.softmax_heads or self.heads

    def compares_softmax(self, seq_len: int) -> bool:
        """Whether softmax is timed at a length."""
        return self.against == "sdpa" and seq_len <= self.softmax_up_to

    def record(self) -> dict[str, Any]:
        asked = {"backward": self.backward, "gates": self.gates, "window_steps": self.window_steps}
        return {**super().record(), **asked, "softmax": self.against == "sdpa"}


class TrainConfig(PrefillConfig):
    """Time the op forward and backward; the columns are those of smat bench prefill."""

    backward: ClassVar[bool] = True

    softmax_up_to: int = option(65536, "Longest T at which softmax is timed.")


class DecodeConfig(HeadsConfig):
    """Time one token of decoding against the context, beside softmax with a KV cache.

    x shortest: to the shortest context, timed in turns with it. Slowest: one step of the first
    pass. Slowest / median: of a window's steps around a move of its boundary, each the fastest of
    all passes.
    """

    contexts: Contexts = option(CONTEXTS, "Tokens in the context; may be repeated.", "context")
    batches: Counts = option((1, 16), "Sequences at once; may be repeated.", "batch")
    schedules: Schedules = option(("fixed", "window"), "Boundary; may be repeated.", "schedule")
    window_step: Count | None = option(None, "Step of the window (a quarter of the context).")
    softmax: bool = option(True, "Time softmax with a KV cache.")
    steps: Count = option(256, "Tokens to decode at each context.")
    window_steps: Count = option(4096, "At most so many tokens of a window, around a move.")
    passes: Count = option(3, "Passes over a window's steps.")
    budget: float = option(30.0, "Seconds for each decoder and context.")
    max_gb: float | None = unrecorded(None, "GB for all states at once (70 % of what is free).")

    def record(self) -> dict[str, Any]:
        return {**super().record(), "max_bytes": self.max_gb and int(self.max_gb * 1e9)}


class LayersConfig(BenchConfig):
    """Time Mamba-2 and Gated DeltaNet beside transformers, and with a learned memory."""

    seq_len: Count = option(4096, "Sequence length T.")
    batch: Count = option(1, "Sequences at once.")
    heads: Count = option(4, "Heads.")
    head_dim: Count = option(64, "Width of a head, and of its state.")
    num_groups: Count = option(1, "Groups of heads that share B and C.")
    vc_dim: Count = option(3, "VC dimension d of the memories.")
    num_reads: Count = option(4, "Types that a query reads.")
    repeats: Count = option(9, "Runs of each candidate.")
    budget: float = option(60.0, BUDGET)

    @model_validator(mode="after")
    def _check(self) -> LayersConfig:
        if self.heads % self.num_groups:
            raise ValueError(f"{self.heads} heads do not fall into {self.num_groups} groups")
        return self
