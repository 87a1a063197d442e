"""What the attention benchmarks run: inputs, masks and the op in each of its variants."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import smat
from smat.masks import Segment
from smat.ops.causal import Arrays, CausalBranch
from smat.ops.pieces import TILE, cut_blocks
from smat.ops.rows import chunks_per_block

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True)
class Shape:
    """Sizes of one problem: T tokens, heads, key and value widths, batch."""

    seq_len: int
    heads: int = 4
    key_dim: int = 64
    value_dim: int = 64
    batch: int = 1

    def __post_init__(self) -> None:
        for name in ("seq_len", "heads", "key_dim", "value_dim", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, but it is {getattr(self, name)}")

    @property
    def causal_flops(self) -> float:
        """Operations of the causal branch: 2 T H (2 r p + c (r + p)), c the tile, p = V + 1."""
        aug_dim = self.value_dim + 1
        per_token = 2 * self.key_dim * aug_dim + TILE * (self.key_dim + aug_dim)
        return 2.0 * self.batch * self.seq_len * self.heads * per_token

    def io_numbers(self, backward: bool) -> int:
        """Count what goes in and comes out: q, k, v and out, with their gradients if asked for."""
        per_token = 2 * self.key_dim + 2 * self.value_dim
        numbers = self.batch * self.seq_len * self.heads * per_token
        return 2 * numbers if backward else numbers

    def output_numbers(self, backward: bool) -> int:
        """Count what comes out: the output, and the gradients of q, k and v."""
        per_token = self.value_dim + (2 * self.key_dim + self.value_dim if backward else 0)
        return self.batch * self.seq_len * self.heads * per_token

    def bound_words(self, vc_dim: int, chunk_size: int) -> float:
        """The theorem's working memory: (T^(1-1/d) + T/c) r p + c^2 for each head.

        >>> round(Shape(65536).bound_words(vc_dim=3, chunk_size=64) * 4 / 1e6)
        176
        """
        states = self.seq_len ** (1 - 1 / vc_dim) + self.seq_len / chunk_size
        per_head = states * self.key_dim * (self.value_dim + 1) + chunk_size**2
        return self.batch * self.heads * per_head


@dataclass(frozen=True)
class Variant:
    """One way to run the op: VC dimension, gates, and the boundary's schedule.

    >>> Variant(3, gated=True, window_step=2048).name
    'd=3 gated window(2048)'
    """

    vc_dim: int
    gated: bool = False
    window_step: int | None = None

    @property
    def name(self) -> str:
        """What tables and figures call it."""
        gates = " gated" if self.gated else ""
        window = "" if self.window_step is None else f" window({self.window_step})"
        return f"d={self.vc_dim}{gates}{window}"

    @property
    def is_plain(self) -> bool:
        """Whether it has neither gates nor a moving boundary."""
        return not self.gated and self.window_step is None

    def mask(self, seq_len: int, chunk_size: int) -> smat.SMatMask:
        """Build the mask; whether VC = d is guaranteed makes no difference to its cost."""
        boundary = None if self.window_step is None else smat.schedules.window(self.window_step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", smat.SMatWarning)
            return smat.SMatMask(seq_len, self.vc_dim, chunk_size, boundary=boundary)


@dataclass(frozen=True)
class Inputs:
    """Leading tensors of one problem, and the gradient that comes back."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    grad_out: Tensor

    @classmethod
    def random(
        cls, shape: Shape, dtype: torch.dtype, device: torch.device, backward: bool, seed: int = 0
    ) -> Inputs:
        """Draw inputs; they ask for gradients if there is a backward pass to time."""
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device, dtype=dtype)

        size = shape.batch, shape.seq_len, shape.heads
        q, k = normal(*size, shape.key_dim), normal(*size, shape.key_dim)
        v = normal(*size, shape.value_dim)
        log_decay = normal(*size).abs_().mul_(-0.05)
        grad_out = normal(*size, shape.value_dim) if backward else v.new_empty(0)
        if backward:
            for leaf in (q, k, v, log_decay):
                leaf.requires_grad_()
        return cls(q, k, v, log_decay, grad_out)

    def to(self, dtype: torch.dtype) -> Inputs:
        """The same numbers in another type."""
        leaves = (self.q, self.k, self.v, self.log_decay, self.grad_out)
        cast = (x.detach().to(dtype).requires_grad_(x.requires_grad) for x in leaves)
        return Inputs(*cast)

    def leaves(self, gated: bool) -> dict[str, Tensor]:
        """What is differentiated, by name."""
        leaves = {"q": self.q, "k": self.k, "v": self.v}
        return {**leaves, "log_decay": self.log_decay} if gated else leaves


def attend(variant: Variant, inputs: Inputs, mask: smat.SMatMask, backward: bool) -> list[Tensor]:
    """Run the op: the output, then the gradients in the order of `leaves`."""
    log_decay = inputs.log_decay if variant.gated else None
    out, _ = smat.smat_attention(inputs.q, inputs.k, inputs.v, mask, log_decay=log_decay)
    return [out, *_gradients(out, inputs, variant.gated, backward)]


def attend_densely(
    variant: Variant, inputs: Inputs, mask: smat.SMatMask, backward: bool
) -> list[Tensor]:
    """The same by the oracle, which is quadratic in memory."""
    log_decay = inputs.log_decay if variant.gated else None
    out = smat.reference_attention(inputs.q, inputs.k, inputs.v, mask, log_decay=log_decay)
    return [out, *_gradients(out, inputs, variant.gated, backward)]


def softmax_attention(inputs: Inputs, heads: int, backward: bool) -> Callable[[], list[Tensor]]:
    """Causal softmax attention of the first heads, in the layout that its kernel wants."""

    def heads_first(x: Tensor) -> Tensor:
        taken = x.detach()[:, :, :heads].transpose(1, 2).contiguous()
        return taken.requires_grad_(backward)

    q, k, v = heads_first(inputs.q), heads_first(inputs.k), heads_first(inputs.v)
    grad_out = inputs.grad_out[:, :, :heads].transpose(1, 2).contiguous() if backward else None

    def run() -> list[Tensor]:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out, *torch.autograd.grad(out, (q, k, v), grad_out)] if backward else [out]

    return run


def causal_branch(inputs: Inputs) -> Callable[[], None]:
    """The causal branch alone: features and augmented values lie in memory, outputs are dropped."""
    phi, psi, values = (
        x.detach().abs().float().transpose(1, 2).flatten(0, 1).contiguous()
        for x in (inputs.q, inputs.k, inputs.v)
    )
    v_aug = F.pad(values, (0, 1), value=1.0)
    length = psi.shape[1]
    blocks = cut_blocks((Segment(0, length, 0),), chunks_per_block(1, psi.device))

    def run() -> None:
        for row in range(len(psi)):
            one = slice(row, row + 1)
            source = Arrays(phi[one].unsqueeze(1), psi[one], v_aug[one])
            for _ in CausalBranch(source, None, blocks).forward():
                pass

    return run


def _gradients(out: Tensor, inputs: Inputs, gated: bool, backward: bool) -> tuple[Tensor, ...]:
    if not backward:
        return ()
    return torch.autograd.grad(out, tuple(inputs.leaves(gated).values()), inputs.grad_out)


def check_device(device: str, dtype: str) -> torch.device:
    """Refuse what would not run, before anything is built."""
    place = torch.device(device)
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device} was asked for, but torch sees no CUDA device")
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, but it is {dtype}")
    if place.type == "cpu" and DTYPES[dtype].itemsize < 4:
        raise ValueError(
            f"dtype {dtype} is not timed on a CPU, where half-precision products are slow "
            f"or missing: use fp32 or fp64"
        )
    return place
