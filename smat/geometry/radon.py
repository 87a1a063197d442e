"""Tabulate type states from profile states, and back (Algorithm 2, and its linear-time form).

``U = C F`` sums the states of the points on every hyperplane: a finite Radon transform. The
paper adds one state per nonzero of C, q^(2d-3) additions. Here shears, one coordinate at a time,
need (d-2) q^d + O(d q^(d-1)): linear in the sequence length, and of non-negative terms still.

For the directions whose leading 1 stands first, start from ``W1 = F`` and for j = 2..D

    Wj[x(j+1)..xD, a2..aj, y] = sum over xj of W(j-1)[xj, x(j+1)..xD, a2..a(j-1), y - aj xj];

then ``U[a2..aD, b] = WD[a2..aD, b]``. Directions with leading zeros see F summed over its first
coordinate: the same problem, one dimension lower. The problems ride along: the table after step j
holds, one behind the other, the D-dimensional problem after step j, the (D-1)-dimensional one after
step j-1, ..., and D-1 calls of ``embedding_bag`` make the whole type table in its own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.geometry import field
from smat.geometry.field import cached_table

METHODS = ("factored", "algorithm2", "dense")  # the last two are slow references

WHOLE_ELEMENTS = 1 << 20  # of a table that is summed as it stands: 4 MB of fp32
STACK_ELEMENTS = 1 << 22  # of the tables that are summed in one call
SLAB_ELEMENTS = 1 << 19  # of a larger table, column by column: what a shear mixes stays in cache
SLAB_COLUMNS = (128, 1024)  # fewer cost more to copy than they save

Step = tuple[Tensor, Tensor]  # entries to be added, sum after sum, and where each sum begins
Steps = Sequence[Step]


@cached_table
def shear_indices(field_size: int, ambient_dim: int, device: torch.device) -> tuple[Tensor, ...]:
    """List, for each shear j = 2..D, the q entries that make each entry after it, (q^D, q)."""
    others = torch.arange(field_size ** (ambient_dim - 2), device=device).view(-1, 1, 1, 1)
    x = torch.arange(field_size, device=device)
    a, y = x.view(-1, 1, 1), x.view(-1, 1)
    sheared = (y - a * x) % field_size
    first = (sheared * field_size + x) * len(others) + others  # F is ordered by y, x2, ..., xD
    later = (x * len(others) + others) * field_size + sheared
    return tuple(step.reshape(-1, field_size) for step in [first] + [later] * (ambient_dim - 2))


@cached_table
def tabulation_steps(field_size: int, ambient_dim: int, device: torch.device) -> Steps:
    """List the D-1 steps from profile states to type states."""
    steps = []
    for step in range(2, ambient_dim + 1):
        sums, before = [], 0
        for num_zeros in range(step - 1):  # the problem of directions with so many leading zeros
            problem_dim = ambient_dim - num_zeros
            shears = shear_indices(field_size, problem_dim, device)
            sums.append(shears[step - 2 - num_zeros] + before)
            before += field_size**problem_dim
        # Summed over a coordinate, the last problem begins the next one.
        last = torch.arange(before - field_size**problem_dim, before, device=device)
        steps.append(_step(torch.cat([*sums, last.view(field_size, -1).T])))
    return steps


@cached_table
def adjoint_steps(field_size: int, ambient_dim: int, device: torch.device) -> Steps:
    """List the D-1 steps from type states to profile states: the adjoints, last step first."""
    return [_adjoint(step) for step in tabulation_steps(field_size, ambient_dim, device)[::-1]]


@cached_table
def incident_points(field_size: int, ambient_dim: int, device: torch.device) -> Steps:
    """List the points of every hyperplane: the one step of Algorithm 2, none at D = 0."""
    in_order = field.offsets(field_size, ambient_dim, device).argsort(dim=1, stable=True)
    return [_step(in_order.unflatten(1, (field_size, -1)).flatten(0, 1))] if ambient_dim else []


def _step(entries: Tensor) -> Step:
    """Write sums of equally many entries, (sums, terms), as a step."""
    num_sums, num_terms = entries.shape
    return entries.flatten(), num_terms * torch.arange(num_sums, device=entries.device)


def _adjoint(step: Step) -> Step:
    """Turn a step around: each entry is the sum of the sums that it was added to."""
    entry, first = step
    begins = torch.zeros_like(entry)
    begins[first[1:]] = 1
    num_sums = entry.bincount()
    return begins.cumsum(0)[entry.argsort(stable=True)], num_sums.cumsum(0) - num_sums


def tabulate_tables(
    table: Tensor,
    field_size: int,
    ambient_dim: int,
    *,
    out: Tensor | None = None,
    place: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Apply C to a stack of tables, (N, P, S) -> (N, B, S), in the table's own dtype.

    >>> tabulate_tables(torch.ones(1, 4, 1), field_size=2, ambient_dim=2).flatten()
    tensor([2., 2., 2., 2., 2., 2.])

    `place` (N, P) says where each point stands in a table if not in its own place, `order` (N, B)
    which type is wanted at each place of the answer; neither costs anything. Where a type is a
    point, D < 2, the answer may be the table itself if no `out` is given.
    """
    return _run(table, tabulation_steps(field_size, ambient_dim, table.device), out, place, order)


def backproject_tables(
    table: Tensor,
    field_size: int,
    ambient_dim: int,
    *,
    out: Tensor | None = None,
    place: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Apply C' to a stack of tables, (N, B, S) -> (N, P, S): the adjoint of tabulating."""
    return _run(table, adjoint_steps(field_size, ambient_dim, table.device), out, place, order)


def _cut(table: Tensor) -> tuple[int, int]:
    """Choose how many tables, and how many of their columns, to sum in one call."""
    num_tables, num_entries, num_columns = (max(1, size) for size in table.shape)
    if table.device.type != "cpu":
        return num_tables, num_columns
    if num_entries * num_columns <= WHOLE_ELEMENTS:
        return max(1, STACK_ELEMENTS // (num_entries * num_columns)), num_columns
    least, most = SLAB_COLUMNS
    return 1, min(max(least, SLAB_ELEMENTS // num_entries), most) // 16 * 16


def _run(
    table: Tensor, steps: Steps, out: Tensor | None, place: Tensor | None, order: Tensor | None
) -> Tensor:
    """Run the steps of a transform over a stack of tables, (N, entries, S) -> (N, answers, S)."""
    if not steps and (place is not None or order is not None):
        steps = [_step(torch.arange(table.shape[1], device=table.device)[:, None])]
    if not steps:
        return table if out is None else out.copy_(table)
    together, width = _cut(table)
    if table.numel() and together >= len(table) and width >= table.shape[2]:
        answers = _sum(table, _for_stack(steps, table, place, order))
        return answers if out is None else out.copy_(answers)
    if out is None:
        out = table.new_empty(len(table), len(steps[-1][1]), table.shape[2])
    for start in range(0, len(table), together):
        some = slice(start, start + together)
        own = [None if names is None else names[some] for names in (place, order)]
        steps_of_some = _for_stack(steps, table[some], *own)
        for column in range(0, table.shape[2], width):
            columns = slice(column, column + width)
            out[some, :, columns] = _sum(table[some, :, columns], steps_of_some)
    return out


def _for_stack(steps: Steps, table: Tensor, place: Tensor | None, order: Tensor | None) -> Steps:
    """Write the steps for all entries of a stack, one table behind the other."""
    num_tables, num_entries, _ = table.shape
    if num_tables == 1 and place is None and order is None:
        return steps
    number = torch.arange(num_tables, device=table.device).unsqueeze(1)
    stacked = []
    for at, (entry, first) in enumerate(steps):
        entries = entry.expand(num_tables, -1)
        if place is not None and at == 0:
            entries = place[:, entry]
        if order is not None and at == len(steps) - 1:  # whose sums have equally many terms
            terms = entries.unflatten(1, (len(first), -1))
            entries = terms.gather(1, order.unsqueeze(-1).expand_as(terms)).flatten(1)
        starts = first + len(entry) * number
        stacked.append(((entries + num_entries * number).flatten(), starts.flatten()))
        num_entries = len(first)
    return stacked


def _sum(table: Tensor, steps: Steps) -> Tensor:
    """Add entries up, step by step; a sum is gathered in registers and written once."""
    entries = table.reshape(-1, table.shape[-1]).contiguous()
    for entry, first in steps:
        entries = F.embedding_bag(entry, entries, first, mode="sum")
    return entries.view(len(table), len(entries) // len(table), table.shape[-1])


@torch.library.custom_op("smat::tabulate", mutates_args=())
def transform(
    table: Tensor, field_size: int, ambient_dim: int, method: str, adjoint: bool
) -> Tensor:
    """Apply C or its adjoint to (..., entries, S), summing in at least fp32; differentiable."""
    space = field_size, ambient_dim, table.device
    wide = table.to(torch.promote_types(table.dtype, torch.float32))
    stack = wide.reshape(wide.shape[:-2].numel(), *wide.shape[-2:]).contiguous()
    if method == "dense":
        incidence = field.incidence(*space).to(wide.dtype)
        answers = (incidence.mT if adjoint else incidence) @ stack
    elif method == "algorithm2":
        steps = incident_points(*space)
        steps = [_adjoint(step) for step in steps] if adjoint else steps
        answers = _run(stack, steps, out=None, place=None, order=None)
    else:
        answers = (backproject_tables if adjoint else tabulate_tables)(stack, *space[:2])
    if answers.data_ptr() == stack.data_ptr():  # an operator returns memory of its own
        answers = answers.clone()
    return answers.reshape(*table.shape[:-2], *answers.shape[-2:]).to(table.dtype)


@transform.register_fake
def _(table: Tensor, field_size: int, ambient_dim: int, method: str, adjoint: bool) -> Tensor:
    num_types = max(1, field_size * field.count_directions(field_size, ambient_dim))
    num_answers = field_size**ambient_dim if adjoint else num_types
    return table.new_empty(*table.shape[:-2], num_answers, table.shape[-1])


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.space, ctx.adjoint = inputs


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return transform(grad, *ctx.space, not ctx.adjoint), None, None, None, None


transform.register_autograd(_backward, setup_context=_remember)
