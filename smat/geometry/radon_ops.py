"""Tabulation as operators that differentiate, compile and take any batch, dtype and stride."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smat.geometry import hyperplanes, radon


def _run(
    transform: Callable[..., Tensor],
    table: Tensor,
    field_size: int,
    ambient_dim: int,
    method: str,
) -> Tensor:
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    stack = wide.reshape(wide.shape[:-2].numel(), *wide.shape[-2:]).contiguous()
    rows = transform(stack, field_size, ambient_dim, method)
    if rows.data_ptr() == stack.data_ptr():  # an operator returns memory of its own
        rows = rows.clone()
    return rows.reshape(*table.shape[:-2], *rows.shape[-2:]).to(table.dtype)


@torch.library.custom_op("smat::tabulate", mutates_args=())
def tabulate(table: Tensor, field_size: int, ambient_dim: int, method: str) -> Tensor:
    """Sum profile states over every hyperplane, (..., P, S) -> (..., B, S)."""
    return _run(radon.tabulate_tables, table, field_size, ambient_dim, method)


@torch.library.custom_op("smat::backproject", mutates_args=())
def backproject(table: Tensor, field_size: int, ambient_dim: int, method: str) -> Tensor:
    """Sum type states over the hyperplanes through every point, (..., B, S) -> (..., P, S)."""
    return _run(radon.backproject_tables, table, field_size, ambient_dim, method)


@tabulate.register_fake
def _(table: Tensor, field_size: int, ambient_dim: int, method: str) -> Tensor:
    num_types = max(1, field_size * hyperplanes.count_directions(field_size, ambient_dim))
    return table.new_empty(*table.shape[:-2], num_types, table.shape[-1])


@backproject.register_fake
def _(table: Tensor, field_size: int, ambient_dim: int, method: str) -> Tensor:
    return table.new_empty(*table.shape[:-2], field_size**ambient_dim, table.shape[-1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.arguments = inputs[1:]


def _tabulate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return backproject(grad, *ctx.arguments), None, None, None


def _backproject_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return tabulate(grad, *ctx.arguments), None, None, None


tabulate.register_autograd(_tabulate_backward, setup_context=_remember)
backproject.register_autograd(_backproject_backward, setup_context=_remember)
