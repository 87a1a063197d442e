"""Chunks of delta-rule transitions in WY form: what the recurrent operators share.

With A_t = a_t (I - beta_t k_t k_t') and gamma the running log decay inside a chunk of c tokens,

    S_i = exp(gamma_i) S_0 + sum over j <= i of exp(gamma_i - gamma_j) k_j u_j',
    (I + L) U = diag(beta) (V - diag(exp gamma) K S_0),
    L_ij = beta_i exp(gamma_i - gamma_j) (k_i . k_j) for i > j,

so that one triangular inverse a chunk replaces c products of r x r matrices, and the product of
the chunk's transitions is  M = exp(gamma_c) I - K_out' (I + L)^-1 diag(beta) K_in  with
K_in = diag(exp gamma) K and K_out = diag(exp(gamma_c - gamma)) K. Gradients are written out: with
autograd they take half as long again, and keep every tile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, reduce, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import CustomOpDef

from smat.ops.linear.decay import FORGETS, LogDecay, between_pairs

GATES = ("beta", "log_decay")
TILES_AT_ONCE = 64  # enough for batched products on all cores, few enough to stay in cache

Kernel = Callable[..., list[Tensor]]  # (tensors, scale, chunk_size)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Find the dtype to accumulate in: the widest given, and at least fp32."""
    return reduce(torch.promote_types, (x.dtype for x in tensors), torch.float32)


def check_shapes(q: Tensor, k: Tensor, chunk_size: int, **by_token: Tensor | None) -> None:
    """Refuse queries and keys, gates (B, T, H) and what has a width that do not fit together."""
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f"q and k must both be (B, T, H, K), not {(*q.shape,)} and {(*k.shape,)}")
    if k.shape[1] < 1:
        raise ValueError(f"a sequence needs at least one token, but k is {(*k.shape,)}")
    axes = k.shape[:3]
    for name, x in {"q": q, **by_token}.items():
        if x is not None and x.device != k.device:
            raise ValueError(f"{name} must be on {k.device} as k is, not on {x.device}")
    for name, x in by_token.items():
        kind, num_axes = ("(B, T, H)", 3) if name in GATES else ("(B, T, H, width)", 4)
        if x is not None and (x.shape[:3] != axes or x.ndim != num_axes or 0 in x.shape[3:]):
            raise ValueError(f"{name} must be {kind}, B, T, H = {(*axes,)}, not {(*x.shape,)}")
    if chunk_size < 2 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two from 2 on, not {chunk_size}")


def check_gates(log_decay: Tensor) -> None:
    """Refuse a gate that grows; on a GPU looking would wait for the device, so it is trusted."""
    if log_decay.device.type == "cpu" and bool((log_decay > 0).any()):
        raise ValueError(f"log_decay must be <= 0, but its largest value is {log_decay.max()}")


def token_ranges(k: Tensor, chunk_size: int) -> list[slice]:
    """Cut the tokens of keys (B, T, H, K) into ranges of chunks that are worked together."""
    size = chunk_size * max(1, TILES_AT_ONCE // (k.shape[0] * k.shape[2]))
    return [slice(start, start + size) for start in range(0, k.shape[1], size)]


def pack(x: Tensor, chunk_size: int, dtype: torch.dtype) -> Tensor:
    """(B, T, H, f), or gates (B, T, H) -> fresh tiles (chunks B H, c, f), zeros behind the end."""
    x = x.unsqueeze(-1) if x.ndim == 3 else x
    batch, seq_len, heads, width = x.shape
    num_chunks = -(-seq_len // chunk_size)
    tiles = x.new_empty(num_chunks, batch, heads, chunk_size, width, dtype=dtype)
    whole = F.pad(x, (0, 0, 0, 0, 0, num_chunks * chunk_size - seq_len))
    tiles.copy_(whole.unflatten(1, (num_chunks, chunk_size)).permute(1, 0, 3, 2, 4))
    return tiles.flatten(0, 2)


def unpack(tiles: Tensor, to: Tensor) -> None:
    """Write tiles (chunks B H, c, f) to (B, T, H, f), or to gates (B, T, H)."""
    chunks = tiles.unflatten(0, (-1, to.shape[0], to.shape[2])).permute(1, 0, 3, 2, 4)
    to.copy_(chunks.flatten(1, 2)[:, : to.shape[1]].reshape(to.shape))


class TileDecay:
    """The decay since a chunk's start and until its end, (N, c, 1), for gates (N, c, 1)."""

    def __init__(self, log_decay: Tensor, dtype: torch.dtype) -> None:
        self.log_decay, self.dtype = log_decay.squeeze(-1), dtype
        self.sums = LogDecay.of(self.log_decay)
        own, first, last = slice(1, None), slice(1), slice(-1, None)
        self.since_start = self.sums.between(own, first, dtype).unsqueeze(-1)
        self.until_end = self.sums.between(last, own, dtype).unsqueeze(-1)

    @cached_property
    def inside(self) -> Tensor:
        """The decay between all pairs of tokens, (N, c, c)."""
        since = self.sums.difference(slice(1, None), slice(1))
        own = LogDecay(*(x[..., 1:] for x in self.sums))
        return between_pairs(own, since, self.dtype)

    def backward(self, pairs: Tensor, since: Tensor, until: Tensor) -> Tensor:
        """Find the gates' gradient from those of the decays, each times the decay itself.

        The diagonal, which no gate can change, is left out: it would cancel only up to rounding.
        """
        pairs = pairs.tril(-1)
        until[:, -1] = 0
        flow = (pairs.sum(-1) - pairs.sum(-2)).add_(since).sub_(until)
        flow[:, -1] += until.sum(-1)
        grad = flow.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1).to(flow.dtype)
        return torch.where(self.log_decay <= FORGETS, 0.0, grad).unsqueeze(-1)


class WYTiles:
    """Tiles q (scaled), k (N, c, K), beta, log_decay (N, c, 1), and products that need no state.

    `reads` is tril(Q K') with decay, `overlap` K K' with decay (used below its diagonal), `erase`
    W = (I + L)^-1 diag(beta) K_in.
    """

    def __init__(self, q: Tensor, k: Tensor, beta: Tensor, log_decay: Tensor) -> None:
        self.q, self.k, self.beta, self.decay = q, k, beta, TileDecay(log_decay, k.dtype)
        self.reads = torch.bmm(q, k.mT).mul_(self.decay.inside)
        self.overlap = torch.bmm(k, k.mT).mul_(self.decay.inside)
        eye = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)
        lower = beta * self.overlap  # solved for a unit diagonal, which is not read
        self.inverse = torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)
        self.query_in = q * self.decay.since_start
        self.key_in = k * self.decay.since_start
        self.key_out = k * self.decay.until_end
        self.erase = torch.bmm(self.inverse, beta * self.key_in)
        self.kept = self.decay.since_start[:, -1]

    def transition(self) -> Tensor:
        """Multiply the chunk's transitions: M, (N, K, K)."""
        product = torch.bmm(self.key_out.mT, self.erase).neg_()
        product.diagonal(dim1=1, dim2=2).add_(self.kept)
        return product

    def backward(
        self,
        grad_reads: Tensor,
        grad_lower: Tensor,
        grad_query_in: Tensor,
        grad_key_in: Tensor,
        grad_key_out: Tensor,
        grad_kept: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Carry gradients to q (scaled), k, beta and the gates; they are used up.

        `grad_reads` is that of `reads`, `grad_lower` that of L, `grad_kept` (N,) of exp(gamma_c).
        """
        pairs = grad_lower.tril_(-1) * self.overlap
        grad_beta = pairs.sum(-1, keepdim=True)
        pairs.mul_(self.beta).addcmul_(grad_reads, self.reads)
        since = (grad_query_in * self.query_in).add_(grad_key_in * self.key_in).sum(-1)
        since[:, -1] += grad_kept * self.kept.squeeze(-1)
        until = (grad_key_out * self.key_out).sum(-1)
        grad_gate = self.decay.backward(pairs, since, until)
        grad_reads = grad_reads.mul_(self.decay.inside)
        grad_overlap = grad_lower.mul_(self.decay.inside).mul_(self.beta)
        grad_q = grad_query_in.mul_(self.decay.since_start).baddbmm_(grad_reads, self.k)
        grad_k = grad_key_in.mul_(self.decay.since_start)
        grad_k.addcmul_(grad_key_out, self.decay.until_end)
        grad_k.baddbmm_(grad_overlap + grad_overlap.mT, self.k).baddbmm_(grad_reads.mT, self.q)
        return grad_q, grad_k, grad_beta, grad_gate


def register_operator(name: str) -> Callable[[Kernel], CustomOpDef]:
    """Make an operator that compilers and autocast leave alone; `vmap` calls it for each entry."""

    def register(kernel: Kernel) -> CustomOpDef:
        @wraps(kernel)
        def run(tensors: Sequence[Tensor], *settings: Any) -> list[Tensor]:
            with torch.autocast(tensors[0].device.type, enabled=False):
                return kernel(tensors, *settings)

        def each(info: Any, in_dims: Any, tensors: Sequence[Tensor], *settings: Any) -> Any:
            found = []
            for i in range(info.batch_size):
                pairs = zip(tensors, in_dims[0], strict=True)
                entry = [x if dim is None else x.select(dim, i) for x, dim in pairs]
                found.append(made(entry, *settings))
            stacked = [torch.stack(outputs) for outputs in zip(*found, strict=True)]
            return stacked, [0] * len(stacked)

        made = torch.library.custom_op(name, run, mutates_args=())
        made.register_vmap(each)
        return made

    return register


class Recomputed(torch.autograd.Function):
    """Call an operator whose gradients another one finds, from the inputs, from its last output,
    which is kept, and from the gradients of the others. Its own (`backward` None) are not known.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        operator: CustomOpDef, _: CustomOpDef | None, scale: float, size: int, *given: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(operator(list(given), scale, size))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.operator, ctx.scale, ctx.chunk_size, *given = inputs[1:]
        if ctx.operator is not None:
            ctx.save_for_backward(*given, output[-1])
            ctx.mark_non_differentiable(output[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.operator is None:
            raise NotImplementedError("second derivatives of recurrent operators are not known")
        tensors = (*ctx.saved_tensors, *grads[:-1])
        return *[None] * 4, *recomputed(ctx.operator, None, ctx.scale, ctx.chunk_size, *tensors)


def recomputed(
    operator: CustomOpDef, backward: CustomOpDef | None, scale: float, size: int, *given: Tensor
) -> tuple[Tensor, ...]:
    """Apply `Recomputed`; a compiler differentiates once, and takes the operator as it is."""
    if backward is None and torch.compiler.is_compiling():
        return tuple(operator(list(given), scale, size))
    return Recomputed.apply(operator, backward, scale, size, *given)  # type: ignore[no-untyped-call]
