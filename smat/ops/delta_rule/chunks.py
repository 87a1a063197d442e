"""Chunks of delta-rule transitions in WY form: what the recurrent operators share.

With A_t = a_t (I - beta_t k_t k_t') and gamma the running log decay inside a chunk of c tokens,

    S_i = exp(gamma_i) S_0 + sum over j <= i of exp(gamma_i - gamma_j) k_j u_j',
    (I + L) U = diag(beta) (V - diag(exp gamma) K S_0),
    L_ij = beta_i exp(gamma_i - gamma_j) (k_i . k_j) for i > j,

so that one triangular inverse a chunk replaces c products of r x r matrices. Everything here is a
differentiable function of plain tensors; the operators differentiate some chunks at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import CustomOpDef

from smat.ops.decay import FORGETS, LogDecay

TILES_AT_ONCE = 64  # enough for batched products on all cores, few enough to stay in cache
SUBSTITUTED_SIZE = 8

Kernel = Callable[..., list[Tensor]]  # (tensors, scale, chunk_size)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Find the dtype to accumulate in: the widest given, and at least fp32."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def check_shapes(
    q: Tensor,
    k: Tensor,
    beta: Tensor | None,
    log_decay: Tensor | None,
    chunk_size: int,
    **by_token: Tensor,
) -> None:
    """Refuse queries, keys, gates and other inputs (B, T, H, .) that do not belong together."""
    if q.ndim != 4 or q.shape != k.shape:
        raise ValueError(f"q and k must both be (B, T, H, K), not {(*q.shape,)} and {(*k.shape,)}")
    if k.shape[1] < 1:
        raise ValueError(f"a sequence needs at least one token, but k is {(*k.shape,)}")
    for name, gate in (("beta", beta), ("log_decay", log_decay)):
        if gate is not None and gate.shape != k.shape[:3]:
            raise ValueError(f"{name} must be (B, T, H) = {(*k.shape[:3],)}, not {(*gate.shape,)}")
    for name, x in by_token.items():
        if x.ndim != 4 or x.shape[:3] != k.shape[:3] or x.shape[3] < 1:
            expected = ", ".join(map(str, k.shape[:3]))
            raise ValueError(f"{name} must be (B, T, H, .) = ({expected}, .), not {(*x.shape,)}")
    if chunk_size < 2 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two from 2 on, not {chunk_size}")


def check_gates(log_decay: Tensor) -> None:
    """Refuse a gate that grows; on a GPU looking would wait for the device, so it is trusted."""
    if log_decay.device.type == "cpu" and bool((log_decay > 0).any()):
        largest = log_decay.max().item()
        raise ValueError(f"log_decay must be <= 0 everywhere, but its largest value is {largest}")


def chunks_at_once(k: Tensor) -> int:
    """Count the chunks whose tiles are worked together, for keys (B, T, H, K)."""
    return max(1, TILES_AT_ONCE // (k.shape[0] * k.shape[2]))


def token_ranges(k: Tensor, chunk_size: int) -> list[slice]:
    """Cut the tokens of keys (B, T, H, K) into ranges of chunks that are worked together."""
    size = chunk_size * chunks_at_once(k)
    return [slice(start, start + size) for start in range(0, k.shape[1], size)]


def pack(x: Tensor, chunk_size: int, dtype: torch.dtype) -> Tensor:
    """(B, T, H, f) -> (B H, chunks, c, f), zeros behind the last token."""
    batch, seq_len, heads, width = x.shape
    tokens = x.transpose(1, 2).to(dtype)
    num_chunks = -(-seq_len // chunk_size)
    tokens = F.pad(tokens, (0, 0, 0, num_chunks * chunk_size - seq_len)).contiguous()
    return tokens.view(batch * heads, num_chunks, chunk_size, width)


def unpack(tiles: Tensor, like: Tensor) -> Tensor:
    """(B H, chunks, c, f) -> (B, T, H, f), with the batch, length, heads and dtype of `like`."""
    batch, seq_len, heads = like.shape[:3]
    x = tiles.reshape(batch, heads, -1, tiles.shape[-1])[:, :, :seq_len]
    return x.transpose(1, 2).to(like.dtype)


class ChunkDecay(torch.autograd.Function):
    """Decay between all pairs of a chunk, since its start and until its end, from gates (..., c).

    Shapes (..., c, c), (..., c, 1) twice. A gate's gradient is a sum over the pairs it lies
    between, without the diagonal, which no gate can change.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        decay = LogDecay(log_decay.reshape(-1, log_decay.shape[-1]))
        counts = torch.arange(1, log_decay.shape[-1] + 1, device=log_decay.device)
        found = (
            decay.triangle(counts, dtype),
            decay.between(counts, torch.zeros_like(counts), dtype).unsqueeze(-1),
            decay.between(counts[-1:], counts, dtype).unsqueeze(-1),
        )
        inside, since_start, until_end = (x.reshape(*log_decay.shape, -1) for x in found)
        return inside, since_start, until_end

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(inputs[0], *output)

    @staticmethod
    def backward(
        ctx: Any, grad_inside: Tensor, grad_start: Tensor, grad_end: Tensor
    ) -> tuple[Tensor, None]:
        log_decay, inside, since_start, until_end = ctx.saved_tensors
        pairs = (grad_inside * inside).tril(-1)
        to_end = (grad_end * until_end).squeeze(-1)
        flow = pairs.sum(-1) - pairs.sum(-2) + (grad_start * since_start).squeeze(-1) - to_end
        flow[..., -1] += to_end.sum(-1)
        grad = flow.flip(-1).cumsum(-1, dtype=torch.float64).flip(-1)
        return torch.where(log_decay <= FORGETS, 0.0, grad).to(log_decay.dtype), None


def chunk_decay(log_decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Apply `ChunkDecay` to gates (..., c, 1)."""
    return ChunkDecay.apply(log_decay.squeeze(-1), dtype)  # type: ignore[no-untyped-call]


class UnitLowerInverse(torch.autograd.Function):
    """Invert I + strict lower part of (..., c, c), c a power of two; the upper part is not read.

    Small diagonal squares are solved by substitution, all tiles at once; then they double in size:
    [[X, 0], [Z, Y]]^-1 = [[X^-1, 0], [-Y^-1 Z X^-1, Y^-1]].
    Powers of the matrix would take fewer steps, but with keys alike they grow like binomials.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(lower: Tensor) -> Tensor:
        shape, size = lower.shape, lower.shape[-1]
        lower = lower.reshape(-1, size, size)
        solved = min(size, SUBSTITUTED_SIZE)
        inverse = torch.zeros_like(lower)
        inverse.diagonal(dim1=1, dim2=2).fill_(1.0)
        _substitute(lower, inverse, solved)
        while solved < size:
            for start in range(0, size, 2 * solved):
                upper = slice(start, start + solved)
                under = slice(start + solved, start + 2 * solved)
                product = torch.bmm(lower[:, under, upper], inverse[:, upper, upper])
                inverse[:, under, upper] = torch.bmm(inverse[:, under, under], product).neg_()
            solved *= 2
        return inverse.view(shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        found: Tensor = -(inverse.mT @ grad @ inverse.mT).tril(-1)
        return found


def _substitute(lower: Tensor, inverse: Tensor, size: int) -> None:
    """Fill the strict lower part of the inverse's diagonal squares, row by row."""
    shape = (len(lower), lower.shape[1] // size, size, lower.shape[1] // size, size)
    rows = lower.view(shape).diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3)
    rows = rows.contiguous()  # (row, column, tile, square): long vectors for short loops
    found = rows.neg()
    for i in range(2, size):
        for j in range(1, i):
            found[i, :j].addcmul_(rows[i, j], found[j, :j], value=-1)
    target = inverse.view(shape).diagonal(dim1=1, dim2=3).permute(1, 2, 0, 3)
    for i in range(1, size):
        target[i, :i] = found[i, :i]


class WYProducts(NamedTuple):
    """Every product of a chunk that needs no state, with K_in = diag(exp gamma) K.

    `reads` is tril(Q K') with decay, `inverse` (I + L)^-1, `written` and `erased` are it times
    diag(beta) V and diag(beta) K_in. Queries are decayed since the chunk's start, `key_out` until
    its end; `kept` (..., 1, 1) is what the whole chunk leaves.
    """

    reads: Tensor
    inverse: Tensor
    written: Tensor
    erased: Tensor
    query_in: Tensor
    key_out: Tensor
    kept: Tensor


def wy_products(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> WYProducts:
    """Multiply tiles q, k (..., c, K), v (..., c, V), beta and log_decay (..., c, 1)."""
    inside, since_start, until_end = chunk_decay(log_decay, k.dtype)
    reads = (q @ k.mT) * inside
    lower = beta * ((k @ k.mT) * inside)
    inverse: Tensor = UnitLowerInverse.apply(lower)  # type: ignore[no-untyped-call]
    solved = inverse @ (beta * torch.cat([v, k * since_start], -1))
    written, erased = solved.split([v.shape[-1], k.shape[-1]], -1)
    return WYProducts(
        reads, inverse, written, erased, q * since_start, k * until_end, since_start[..., -1:, :]
    )


def register_operator(name: str) -> Callable[[Kernel], CustomOpDef]:
    """Make a function of tensors (B, ...) and settings an operator that compilers do not look into.

    It chooses its own precision, whatever autocast says, and `vmap` runs it as a larger batch.
    """

    def register(kernel: Kernel) -> CustomOpDef:
        @wraps(kernel)
        def run(tensors: Sequence[Tensor], *settings: Any) -> list[Tensor]:
            with torch.autocast(tensors[0].device.type, enabled=False):
                return kernel(tensors, *settings)

        def over_batch(info: Any, in_dims: Any, tensors: Sequence[Tensor], *settings: Any) -> Any:
            size = info.batch_size
            folded = [
                (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).flatten(0, 1)
                for x, dim in zip(tensors, in_dims[0], strict=True)
            ]
            found = [x.unflatten(0, (size, len(x) // size)) for x in made(folded, *settings)]
            return found, [0] * len(found)

        made = torch.library.custom_op(name, run, mutates_args=())
        made.register_vmap(over_batch)
        return made

    return register


class Recomputed(torch.autograd.Function):
    """Call an operator whose gradients another one finds; the last output is kept for that one.

    Both take a list of tensors (B, ...), the second the inputs, what was kept, and the gradients of
    the other outputs. Its own gradients (`backward` None) are not known.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        kernel: Kernel, backward: CustomOpDef | None, scale: float, chunk_size: int, *given: Tensor
    ) -> tuple[Tensor, ...]:
        return tuple(kernel(list(given), scale, chunk_size))

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
        found = find_gradients(ctx.operator, ctx.scale, ctx.chunk_size, *tensors)
        return None, None, None, None, *found


def find_gradients(
    operator: CustomOpDef, scale: float, chunk_size: int, *tensors: Tensor
) -> tuple[Tensor, ...]:
    """Call an operator that differentiates, as one only where it has to be one.

    Compilers do not look into gradients. Without transforms like `vmap` the function inside is
    called, so that modes which watch every product, as a counter of operations, see them.
    """
    if torch.compiler.is_compiling():
        return tuple(operator(list(tensors), scale, chunk_size))
    is_transformed = torch._C._are_functorch_transforms_active()
    function = operator if is_transformed else operator._init_fn
    return Recomputed.apply(function, None, scale, chunk_size, *tensors)  # type: ignore[no-untyped-call]
