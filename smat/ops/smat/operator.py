"""The operator that autograd, compilers and function transforms see: tensors, the mask as text."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from smat.masks import SMatMask
from smat.ops.backend import choose_backend
from smat.ops.smat import attention
from smat.ops.smat.arguments import check_values
from smat.ops.smat.attention import Inputs, Options
from smat.ops.smat.routing import Gates, Routing

NUM_TENSORS = 11  # the leading arguments of the operator
NUM_DIFFERENTIABLE = 7  # those of them that have gradients, which come first
LARGEST_HEAP_BLOCK = 31 << 20  # just under the size at which malloc stops to adapt


@torch.library.custom_op("smat::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    key_gate: Tensor | None,
    write_weight: Tensor | None,
    read_weight: Tensor | None,
    profile: Tensor | None,
    query_type: Tensor | None,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    mask: str,
    feature_map: str,
    normalize: bool,
    branch: str,
    decay_scope: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the output and the normaliser; at positions (R,), where q and its reads are given."""
    inputs, options = _unpack(
        (q, k, v, log_decay, key_gate, write_weight, read_weight, profile, query_type, positions,
         cu_seqlens), mask, feature_map, normalize, branch, decay_scope, backend,
    )  # fmt: skip
    routing = inputs.routing
    check_values(inputs.gates, routing, cu_seqlens, positions, options.mask, k.shape[1])
    keep_freed_pages()
    with torch.autocast(q.device.type, enabled=False):  # sums keep the dtype that the op chose
        answers = attention.attend(inputs, options, choose_backend(backend, q.device))
    if positions is None:
        return answers
    out, normalizer = (x[:, positions] for x in answers)
    return out, normalizer


@torch.library.custom_op("smat::attend_backward", mutates_args=())
def attend_backward(
    grad_out: Tensor,
    out: Tensor,
    normalizer: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    key_gate: Tensor | None,
    write_weight: Tensor | None,
    read_weight: Tensor | None,
    profile: Tensor | None,
    query_type: Tensor | None,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    mask: str,
    feature_map: str,
    normalize: bool,
    branch: str,
    decay_scope: str,
    backend: str,
) -> list[Tensor]:
    """Return the gradients of q, k, v and of those gates and weights that were given."""
    inputs, options = _unpack(
        (q, k, v, log_decay, key_gate, write_weight, read_weight, profile, query_type, positions,
         cu_seqlens), mask, feature_map, normalize, branch, decay_scope, backend,
    )  # fmt: skip
    keep_freed_pages()
    answers = (_spread(x, positions, k.shape[1]) for x in (grad_out, out, normalizer))
    with torch.autocast(q.device.type, enabled=False):
        grads = attention.attend_backward(
            inputs, options, choose_backend(backend, q.device), *answers
        )
    if positions is not None:
        grads = {
            name: grad[:, positions] if name in ("q", "read_weight") else grad
            for name, grad in grads.items()
        }
    return list(grads.values())


def _unpack(tensors: tuple[Any, ...], mask: str, *options: Any) -> tuple[Inputs, Options]:
    """Sort the operator's arguments; queries at positions take their places among all tokens."""
    q, k, v, log_decay, key_gate, write_weight, read_weight, profile, query_type, at, edges = (
        tensors
    )
    q, query_type, read_weight = (_spread(x, at, k.shape[1]) for x in (q, query_type, read_weight))
    routing = Routing(profile, query_type, write_weight, read_weight)
    inputs = Inputs(q, k, v, Gates(log_decay, key_gate), routing, edges)
    return inputs, Options(_mask_from(mask), *options)


def _spread(x: Any, positions: Tensor | None, length: int) -> Any:
    """Give what is known at positions (B, R, ...) its place among all tokens, 0 elsewhere."""
    if x is None or positions is None:
        return x
    return x.new_zeros(len(x), length, *x.shape[2:]).index_copy_(1, positions.long(), x)


@lru_cache(maxsize=256)
def _mask_from(recipe: str) -> SMatMask:
    return SMatMask.from_dict(json.loads(recipe))


@cache
def keep_freed_pages() -> None:
    """Let malloc keep the pages of temporaries that were freed, once a process.

    glibc serves a block from its heap, and keeps it there when it is freed, if a block of that size
    was freed before; until then every temporary of a few megabytes comes from the system, page by
    page, and goes back. Freeing one untouched block teaches it. At most twice its size stays with
    the process. Allocators that do not learn this way take no notice.
    """
    torch.empty(LARGEST_HEAP_BLOCK, dtype=torch.uint8)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(v.dtype, torch.float32)
    shape = (*q.shape[:2], max(q.shape[2], v.shape[2]))
    return v.new_empty(*shape, v.shape[-1], dtype=wide), v.new_empty(shape, dtype=wide)


@attend_backward.register_fake
def _(grad_out: Tensor, out: Tensor, normalizer: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in rest[:NUM_DIFFERENTIABLE] if x is not None]


def _fold_batch(
    info: Any, in_dims: tuple[int | None, ...], args: tuple[Any, ...], num_tensors: int
) -> tuple[Any, ...]:
    """Make the dimension that `vmap` maps over a part of the batch."""
    edges, positions = args[num_tensors - 1], in_dims[num_tensors - 2]
    if edges is not None or positions is not None:
        raise ValueError("vmap maps neither packed sequences nor positions; use the batch axis")
    folded = []
    for place, (x, dim) in enumerate(zip(args[:num_tensors], in_dims, strict=False)):
        if x is None or place >= num_tensors - 2:
            folded.append(x)
            continue
        each = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        folded.append(each.flatten(0, 1))
    return (*folded, *args[num_tensors:])


@attend.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    answers = attend(*_fold_batch(info, in_dims, args, NUM_TENSORS))
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in answers), (0, 0)


@attend_backward.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    grads = attend_backward(*_fold_batch(info, in_dims, args, NUM_TENSORS + 3))
    return [x.unflatten(0, (info.batch_size, -1)) for x in grads], [0] * len(grads)


class Attend(torch.autograd.Function):
    """The operator with its gradient; a function of this form serves `torch.func` too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return attend(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output, *inputs[:NUM_TENSORS])
        ctx.options = inputs[NUM_TENSORS:]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
        out, normalizer, *tensors = ctx.saved_tensors
        grads = iter(attend_backward(grad_out, out, normalizer, *tensors, *ctx.options))
        named = [None if x is None else next(grads) for x in tensors[:NUM_DIFFERENTIABLE]]
        return (*named, *[None] * (len(tensors) + len(ctx.options) - NUM_DIFFERENTIABLE))

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            "SMat-Attention has no forward-mode derivative; use reverse mode: grad, vjp or jacrev"
        )
