"""What `smat bench decode` is to time, and the bytes that it will take."""

from __future__ import annotations

from dataclasses import dataclass

from smat.bench.workload import DTYPES, Shape, Variant, check_device

SOFTMAX = "softmax"


@dataclass(frozen=True)
class DecodeConfig:
    """Contexts, VC dimensions and batches; `window_step` None is a quarter of the context."""

    contexts: tuple[int, ...] = (1024, 4096, 16384, 65536, 262144)
    vc_dims: tuple[int, ...] = (1, 2, 3, 4)
    batches: tuple[int, ...] = (1, 16)
    heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    chunk_size: int = 64
    schedules: tuple[str, ...] = ("fixed", "window")
    window_step: int | None = None
    softmax: bool = True
    steps: int = 256
    window_steps: int = 4096  # at most so many steps of a window, around a move of its boundary
    passes: int = 3  # over the same steps of a window
    budget: float = 30.0
    max_bytes: int | None = None  # of all states alive; None: 70 % of the memory that is free
    dtype: str = "fp32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_device(self.device, self.dtype)
        for name in ("contexts", "vc_dims", "batches", "schedules"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give at least one")
        for name in ("steps", "window_steps", "passes", "chunk_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, but it is {getattr(self, name)}")
        if min(self.contexts) < 8:
            raise ValueError(f"a context must be 8 or more, but one is {min(self.contexts)}")
        if self.window_step is not None and self.window_step < 1:
            raise ValueError(f"window_step must be 1 or more, but it is {self.window_step}")
        for batch in self.batches:
            self.shape(max(self.contexts), batch)

    def shape(self, context: int, batch: int) -> Shape:
        """The problem at one context."""
        return Shape(context, self.heads, self.key_dim, self.value_dim, batch)

    def decoders(self, batch: int, context: int) -> list[Decoder]:
        """All decoders at one batch and context, d = 1 once."""
        found = [
            Decoder(schedule, vc_dim, context, batch)
            for schedule in self.schedules
            for vc_dim in self.vc_dims
            if schedule == "fixed" or vc_dim > 1
        ]
        return [*found, Decoder(SOFTMAX, 0, context, batch)] if self.softmax else found


@dataclass(frozen=True)
class Decoder:
    """Something that decodes one token at a time: a state of some schedule and d, or softmax."""

    kind: str  # "fixed", "window" or "softmax"
    vc_dim: int
    context: int
    batch: int

    @property
    def name(self) -> str:
        """What tables and figures call it, whatever the context and the batch."""
        if self.kind == SOFTMAX:
            return SOFTMAX
        return f"d={self.vc_dim}" + (" window" if self.kind == "window" else "")

    @property
    def key(self) -> str:
        """A name that tells contexts apart."""
        return f"{self.name} at {self.context}, batch {self.batch}"

    def at(self, context: int) -> Decoder:
        """The same at another context."""
        return Decoder(self.kind, self.vc_dim, context, self.batch)

    def window_step(self, config: DecodeConfig) -> int:
        """The step of the window: the paper's quarter of the horizon, unless it was given."""
        return config.window_step or max(1, self.context // 4)

    def variant(self, config: DecodeConfig) -> Variant:
        """The mask's recipe."""
        step = self.window_step(config) if self.kind == "window" else None
        return Variant(self.vc_dim, window_step=step)

    def num_steps(self, config: DecodeConfig) -> int:
        """How many steps to take in one pass; a window's go around a move of its boundary."""
        if self.kind != "window":
            return config.steps
        return max(1, min(config.window_steps, 2 * self.window_step(config), self.context))

    def prefilled(self, config: DecodeConfig) -> tuple[int, int]:
        """How many tokens are prefilled, and how many are added before the first timed step.

        A fixed boundary has its horizon at the end of the steps. A window's boundary moves in
        their middle; it is prefilled up to a block's beginning and then extended, so that its next
        type table is as far built as it is while decoding.
        """
        if self.kind != "window":
            return self.context, 0
        step = self.window_step(config)
        move = max(2, self.context // step) * step
        return move - step, max(0, step - self.num_steps(config) // 2)

    def horizon(self, config: DecodeConfig) -> int:
        """The length that the mask is built for."""
        return self.context if self.kind == "window" else self.context + config.steps

    def expected_bytes(self, config: DecodeConfig) -> int:
        """Estimate what the decoder keeps: B + 1 states, keys and values, or a window's tables.

        A window keeps two type tables (one in the making), two profile tables and two running
        states. A batch is copied from one sequence.
        """
        itemsize = DTYPES[config.dtype].itemsize
        if self.kind == SOFTMAX:
            per_token = config.key_dim + config.value_dim
            tokens = self.batch * config.heads * (self.context + config.steps)
            return tokens * per_token * itemsize
        geometry = self.variant(config).mask(self.horizon(config), config.chunk_size).geometry
        states = geometry.num_types + 1
        if self.kind == "window":
            states = 2 * (geometry.num_types + geometry.num_profiles + 1)
        numbers = (self.batch + 1) * config.heads * config.key_dim * (config.value_dim + 1)
        return states * numbers * itemsize
