"""What `smat bench prefill` and `smat bench train` are to time."""

from __future__ import annotations

from dataclasses import dataclass

from smat.bench.workload import Shape, Variant, check_device

SOFTMAX, GEMM, CAUSAL = "softmax", "gemm", "causal branch"


@dataclass(frozen=True)
class AttentionConfig:
    """What to time; `softmax_heads` fewer than `heads` are timed for both sides of that ratio."""

    backward: bool
    seq_lens: tuple[int, ...] = (4096, 16384)
    vc_dims: tuple[int, ...] = (1, 2, 3, 4)
    heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    batch: int = 1
    chunk_size: int = 64
    gates: tuple[bool, ...] = (False,)
    window_steps: tuple[int | None, ...] = (None,)
    softmax: bool = True
    softmax_up_to: int = 65536
    softmax_heads: int | None = None
    repeats: int = 5
    budget: float = 60.0
    memory: bool = True
    gemm_size: int = 2048
    dtype: str = "fp32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        check_device(self.device, self.dtype)
        for name in ("seq_lens", "vc_dims", "gates", "window_steps"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give at least one")
        for name in ("chunk_size", "repeats", "gemm_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, but it is {getattr(self, name)}")
        if self.softmax_heads is not None and not 1 <= self.softmax_heads <= self.heads:
            raise ValueError(
                f"softmax_heads must lie in 1..{self.heads}, but it is {self.softmax_heads}"
            )
        if len(set(self.seq_lens)) != len(self.seq_lens):
            raise ValueError(f"each length may be given once, but they are {list(self.seq_lens)}")
        for seq_len in self.seq_lens:
            self.shape(seq_len)

    def shape(self, seq_len: int) -> Shape:
        """The problem at one length."""
        return Shape(seq_len, self.heads, self.key_dim, self.value_dim, self.batch)

    def variants(self) -> list[Variant]:
        """All variants of the op, d = 1 and the fixed boundary among them as yardsticks."""
        steps = sorted({None, *self.window_steps}, key=lambda step: step or 0)
        return [
            Variant(vc_dim, gated, step)
            for gated in self.gates
            for vc_dim in sorted({1, *self.vc_dims})
            for step in steps
            if step is None or vc_dim > 1  # at d = 1 the boundary changes nothing
        ]

    def compared_heads(self) -> int:
        """The heads with which the op and softmax are compared."""
        return self.heads if self.softmax_heads is None else self.softmax_heads

    def compares(self, seq_len: int) -> bool:
        """Whether softmax is timed at a length."""
        return self.softmax and seq_len <= self.softmax_up_to


def expected_costs(config: AttentionConfig, seq_len: int) -> dict[str, float]:
    """Expected costs at a length, for the time left; softmax is quadratic."""
    both = 3.0 if config.backward else 1.0
    tokens = float(seq_len * config.batch * config.heads) * both
    weights = {
        variant.name: tokens * variant.vc_dim * (1.3 if variant.gated else 1.0)
        for variant in config.variants()
    }
    heads = config.compared_heads()
    if config.compares(seq_len):
        share = heads / config.heads
        weights[SOFTMAX] = tokens * share * max(1.0, seq_len / 1024)
        if heads != config.heads:
            for variant in config.variants():
                weights[with_heads(variant, heads)] = weights[variant.name] * share
    if not config.backward:
        weights[CAUSAL] = tokens
    return {**weights, GEMM: config.gemm_size**3 / 65536}


def with_heads(variant: Variant, heads: int) -> str:
    return f"{variant.name}, {heads} heads"
