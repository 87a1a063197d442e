"""The operator that autograd, compilers and function transforms see: tensors, the mask as text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smat.machine import OF_A_CALL, keep_freed_memory
from smat.masks import SMatMask
from smat.ops.backend import choose_backend, say_once
from smat.ops.smat.arguments import check_values
from smat.ops.smat.routing import Gates, Inputs, Options, Routing

# The tensors of the operator, in this order; those with a gradient come first.
TENSORS = (
    "q", "k", "v", "log_decay", "key_gate", "write_weight", "read_weight", "profile", "query_type",
    "positions", "cu_seqlens",
)  # fmt: skip
NUM_DIFFERENTIABLE = 7


@torch.library.custom_op("smat::attend", mutates_args=())
def attend(
    tensors: Sequence[Tensor | None],
    mask: str,
    feature_map: str,
    normalize: bool,
    branch: str,
    decay_scope: str,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return the output and the normaliser; at positions (R,), where q and its reads are given."""
    options = Options(_mask_from(mask), feature_map, normalize, branch, decay_scope, backend)
    inputs, positions = _sort(tensors)
    q, k, edges = inputs.q, inputs.k, inputs.cu_seqlens
    check_values(inputs.gates, inputs.routing, edges, positions, options.mask, k.shape[1])
    chosen = choose_backend(backend, q.device, *_dtypes(inputs), tokens=_num_tokens(inputs))
    say_once(chosen.name, q.device.type, backend)
    keep_freed_memory(*OF_A_CALL)
    with torch.autocast(q.device.type, enabled=False):  # sums keep the op's own dtype
        if positions is None:
            return chosen.attend(inputs, options)
        answers = _answers_like(inputs)
        for some in _distinct(positions):
            at = positions[some]
            found = chosen.attend(_spread_queries(inputs, some, at), options)
            for into, x in zip(answers, found, strict=True):
                into[:, some] = x[:, at]
    return answers


@torch.library.custom_op("smat::attend_backward", mutates_args=())
def attend_backward(
    answers: Sequence[Tensor],
    tensors: Sequence[Tensor | None],
    mask: str,
    feature_map: str,
    normalize: bool,
    branch: str,
    decay_scope: str,
    backend: str,
) -> list[Tensor]:
    """Return the gradients of q, k, v and of those gates and weights that were given.

    ``answers`` are the gradient of the output, the output and the normaliser.
    """
    options = Options(_mask_from(mask), feature_map, normalize, branch, decay_scope, backend)
    inputs, positions = _sort(tensors)
    chosen = choose_backend(backend, inputs.q.device, *_dtypes(inputs), tokens=_num_tokens(inputs))
    length = inputs.k.shape[1]
    keep_freed_memory(*OF_A_CALL)
    with torch.autocast(inputs.q.device.type, enabled=False):
        given = [x for x in tensors[:NUM_DIFFERENTIABLE] if x is not None]
        if positions is None:
            total = list(chosen.attend_backward(inputs, options, *answers).values())
            return [grad.to(x.dtype) for grad, x in zip(total, given, strict=True)]
        wide = [torch.promote_types(x.dtype, torch.float32) for x in given]
        total = [torch.zeros_like(x, dtype=dtype) for x, dtype in zip(given, wide, strict=True)]
        for some in _distinct(positions):
            at = positions[some]
            back = (_spread(x[:, some], at, length) for x in answers)
            found = chosen.attend_backward(_spread_queries(inputs, some, at), options, *back)
            for into, (name, grad) in zip(total, found.items(), strict=True):
                if name in ("q", "read_weight"):
                    into[:, some] = grad[:, at]
                else:
                    into += grad
    return [grad.to(x.dtype) for grad, x in zip(total, given, strict=True)]


def _sort(tensors: Sequence[Any]) -> tuple[Inputs, Tensor | None]:
    """Sort the operator's tensors; the positions come apart."""
    named = dict(zip(TENSORS, tensors, strict=True))
    inputs = Inputs(
        named["q"], named["k"], named["v"], Gates(*(named[name] for name in Gates._fields)),
        Routing(*(named[name] for name in Routing._fields)), named["cu_seqlens"],
    )  # fmt: skip
    return inputs, named["positions"]


def _dtypes(inputs: Inputs) -> tuple[torch.dtype, ...]:
    return inputs.q.dtype, inputs.k.dtype, inputs.v.dtype


def _num_tokens(inputs: Inputs) -> int:
    """Count tokens x heads of answers."""
    return math.prod(inputs.k.shape[:2]) * max(inputs.q.shape[2], inputs.v.shape[2])


def _distinct(positions: Tensor) -> Iterator[Tensor]:
    """Split queries (R,) so that no two of one part stand at the same position: mostly one part."""
    order = positions.long().argsort(stable=True)
    ordered = positions[order]
    first = torch.searchsorted(ordered, ordered)
    occurrence = torch.arange(len(order), device=order.device) - first
    for number in range(int(occurrence.max()) + 1 if len(order) else 0):
        yield order[occurrence == number]


def _spread_queries(inputs: Inputs, some: Tensor, at: Tensor) -> Inputs:
    """Give some queries and their reads the places among all tokens at which they stand."""
    length, routing = inputs.k.shape[1], inputs.routing
    types, weight = routing.query_type, routing.read_weight
    routing = routing._replace(
        query_type=None if types is None else _spread(types[:, some], at, length),
        read_weight=None if weight is None else _spread(weight[:, some], at, length),
    )
    return inputs._replace(q=_spread(inputs.q[:, some], at, length), routing=routing)


def _spread(x: Tensor, at: Tensor, length: int) -> Tensor:
    """(B, R, ...) -> (B, T, ...), 0 where there is no query."""
    return x.new_zeros(len(x), length, *x.shape[2:]).index_copy_(1, at.long(), x)


def _answers_like(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Describe the output and the normaliser: (B, R, H, V) and (B, R, H), fp32 or wider."""
    q, v = inputs.q, inputs.v
    wide = torch.promote_types(v.dtype, torch.float32)
    shape = (*q.shape[:2], max(q.shape[2], v.shape[2]))
    return v.new_empty(*shape, v.shape[-1], dtype=wide), v.new_empty(shape, dtype=wide)


@lru_cache(maxsize=256)
def _mask_from(recipe: str) -> SMatMask:
    return SMatMask.from_dict(json.loads(recipe))


@attend.register_fake
def _(tensors: Sequence[Any], *_: Any) -> tuple[Tensor, Tensor]:
    return _answers_like(_sort(tensors)[0])


@attend_backward.register_fake
def _(answers: Sequence[Tensor], tensors: Sequence[Any], *_: Any) -> list[Tensor]:
    return [torch.empty_like(x) for x in tensors[:NUM_DIFFERENTIABLE] if x is not None]


def _fold(info: Any, dims: Sequence[int | None], tensors: Sequence[Any]) -> list[Any]:
    """Make the dimension that `vmap` maps over a part of the batch."""
    folded = []
    for name, x, dim in zip(TENSORS[: len(tensors)], tensors, dims, strict=True):
        if x is None or (name == "positions" and dim is None):
            folded.append(x)
            continue
        if name in ("positions", "cu_seqlens"):
            raise ValueError(f"vmap does not go over {name}; put the sequences into the batch")
        each = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        folded.append(each.flatten(0, 1))
    return folded


@attend.register_vmap
def _(info: Any, in_dims: Any, tensors: Sequence[Any], *options: Any) -> tuple[Any, Any]:
    answers = attend(_fold(info, in_dims[0], tensors), *options)
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in answers), (0, 0)


@attend_backward.register_vmap
def _(
    info: Any, in_dims: Any, answers: Sequence[Any], tensors: Sequence[Any], *options: Any
) -> tuple[Any, Any]:
    folded = (_fold(info, dims, x) for dims, x in zip(in_dims, (answers, tensors), strict=False))
    grads = attend_backward(*folded, *options)
    return [x.unflatten(0, (info.batch_size, -1)) for x in grads], [0] * len(grads)


class Gradient(torch.autograd.Function):
    """The gradient of the operator, which has none of its own."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        last = 3 + len(TENSORS)
        return tuple(attend_backward(args[:3], args[3:last], *args[last:]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError("the second derivative of SMat-Attention is not known")


class Attend(torch.autograd.Function):
    """The operator with its gradient; a function of this form serves `torch.func` too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return attend(list(args[: len(TENSORS)]), *args[len(TENSORS) :])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.save_for_backward(*output, *inputs[: len(TENSORS)])
        ctx.options = inputs[len(TENSORS) :]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Any, ...]:
        out, normalizer, *tensors = ctx.saved_tensors
        answers = (grad_out, out, normalizer)
        if torch.compiler.is_compiling():  # which differentiates once, and takes it as it is
            grads = iter(attend_backward(answers, tensors, *ctx.options))
        else:
            grads = iter(Gradient.apply(*answers, *tensors, *ctx.options))  # type: ignore[no-untyped-call]
        named = [None if x is None else next(grads) for x in tensors[:NUM_DIFFERENTIABLE]]
        return (*named, *[None] * (len(tensors) + len(ctx.options) - NUM_DIFFERENTIABLE))


def run_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Gates,
    routing: Routing,
    positions: Tensor | None,
    cu_seqlens: Tensor | None,
    options: Options,
) -> Tensor:
    """Call the operator with its gradient; in it types have a weight each or none."""
    types, weight = routing.query_type, routing.read_weight
    if types is not None and types.ndim == 3 and weight is not None:
        types, weight = types.unsqueeze(-1), weight.unsqueeze(-1)
    tensors = (
        q, k, v, *gates, routing.write_weight, weight, routing.profile, types, positions,
        cu_seqlens,
    )  # fmt: skip
    recipe = (options.mask.recipe, *options[1:])
    needs_grad = any(x is not None and x.requires_grad for x in tensors)
    if torch.compiler.is_compiling() and not needs_grad:  # a compiler wants it so
        out, _ = attend(tensors, *recipe)
    else:
        out, _ = Attend.apply(*tensors, *recipe)  # type: ignore[no-untyped-call]
    return out
