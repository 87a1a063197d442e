"""The operator that autograd and compilers see: tensors, and the mask as its recipe."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from smat.masks import SMatMask
from smat.ops.arguments import check_values
from smat.ops.attention import DIFFERENTIABLE, smat_backward, smat_forward
from smat.ops.rows import Inputs
from smat.ops.workspace import keep_freed_pages

NUM_TENSORS = 11  # the leading arguments of the operator that are tensors
NUM_DIFFERENTIABLE = len(DIFFERENTIABLE)  # those of them that have gradients, which come first


@lru_cache(maxsize=256)
def _mask_from(recipe: str) -> SMatMask:
    return SMatMask.from_dict(json.loads(recipe))


def _inputs(tensors: tuple[Any, ...], recipe: str, *options: Any) -> Inputs:
    arguments: tuple[Any, ...] = (*tensors, _mask_from(recipe), *options)
    return Inputs(*arguments)


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
    num_kept: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend under a mask given by its recipe: the operator that autograd and compilers see."""
    tensors = (
        q, k, v, log_decay, key_gate, write_weight, read_weight, profile, query_type, positions,
        cu_seqlens,
    )  # fmt: skip
    inputs = _inputs(tensors, mask, feature_map, normalize, branch)
    check_values(log_decay, profile, query_type, cu_seqlens, positions, inputs.mask, k.shape[1])
    keep_freed_pages()
    with torch.autocast(q.device.type, enabled=False):  # sums keep the dtype that the op chose
        return smat_forward(inputs, num_kept)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide, num_kept = torch.promote_types(v.dtype, torch.float32), rest[-1]
    shape = (*q.shape[:2], max(q.shape[2], v.shape[2]))
    shapes = (*shape, v.shape[-1]), shape, (num_kept,)
    out, normalizer, tables = (v.new_empty(shape, dtype=wide) for shape in shapes)
    return out, normalizer, tables


@torch.library.custom_op("smat::attend_backward", mutates_args=())
def attend_backward(
    grad_out: Tensor,
    out: Tensor,
    normalizer: Tensor,
    tables: Tensor,
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
) -> list[Tensor]:
    """Return the gradients of q, k, v and of those gates that were given."""
    tensors = (
        q, k, v, log_decay, key_gate, write_weight, read_weight, profile, query_type, positions,
        cu_seqlens,
    )  # fmt: skip
    inputs = _inputs(tensors, mask, feature_map, normalize, branch)
    keep_freed_pages()
    with torch.autocast(q.device.type, enabled=False):
        return list(smat_backward(inputs, grad_out, out, normalizer, tables).values())


@attend_backward.register_fake
def _(
    grad_out: Tensor, out: Tensor, normalizer: Tensor, tables: Tensor, *rest: Any
) -> list[Tensor]:
    return [torch.empty_like(x) for x in rest[:NUM_DIFFERENTIABLE] if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output, *inputs[:NUM_TENSORS])
    ctx.options = inputs[NUM_TENSORS:]
    ctx.set_materialize_grads(False)  # tables have none, and zeros of their size would cost


def _backward(ctx: Any, grad_out: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    out, normalizer, tables, *tensors = ctx.saved_tensors
    if grad_out is None:
        return (None,) * (len(tensors) + len(ctx.options))
    options = ctx.options[:-1]  # how much was kept is seen from the tables
    grads = iter(attend_backward(grad_out, out, normalizer, tables, *tensors, *options))
    named = [None if x is None else next(grads) for x in tensors[:NUM_DIFFERENTIABLE]]
    return (*named, *[None] * (len(tensors) + len(ctx.options) - NUM_DIFFERENTIABLE))


attend.register_autograd(_backward, setup_context=_setup_context)
