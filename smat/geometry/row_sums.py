"""Run the steps of a transform over a stack of tables: every step sums rows into new rows.

A sum of rows is an ``embedding_bag`` in sum mode: rows are accumulated in registers and written
once. A small table is summed as it stands, and several of them in one call. Of a large one, columns
are taken in blocks so narrow that the rows which a step mixes stay in cache.

The rows of a table may stand in any order, each table of a stack in one of its own: the first step
then looks for rows where they are, and the last one writes them where they are wanted. Neither
costs anything but another index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Stage = tuple[Tensor, Tensor]  # rows to be added, bag after bag, and where each bag begins

WHOLE_ELEMENTS = 1 << 20  # of a table that is summed as it stands: 4 MB of fp32
STACK_ELEMENTS = 1 << 22  # of the tables that are summed in one call
BLOCK_ELEMENTS = 1 << 19  # of a table's block of columns: 2 MB of fp32
BLOCK_COLUMNS = (128, 1024)  # narrower ones cost more to copy than they save, wider ones miss


def sum_rows(
    table: Tensor,
    stages: Sequence[Stage],
    *,
    out: Tensor | None = None,
    place: Tensor | None = None,
    order: Tensor | None = None,
) -> Tensor:
    """Run the stages over a stack of tables, (N, rows, S) -> (N, answers, S).

    >>> pairs = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 2])  # add neighbours
    >>> sum_rows(torch.tensor([[[1.0], [2.0], [4.0]]]), [pairs]).flatten()
    tensor([3., 6.])

    `place` (N, rows) says where each row stands if not in its own place, `order` (N, answers) which
    answer is wanted at each place. Without any stage and without `out`, the answer may be the table
    itself.
    """
    if not stages and (place is not None or order is not None):
        each = torch.arange(table.shape[1], device=table.device)
        stages = [(each, each)]
    if not stages:
        return table if out is None else out.copy_(table)
    num_tables, _, num_columns = table.shape
    if table.numel() and at_once(table):
        answers = _run(table, _steps(table, stages, place, order))
        return answers if out is None else out.copy_(answers)
    if out is None:
        out = table.new_empty(num_tables, len(stages[-1][1]), num_columns)
    if not table.numel():
        return out
    together, width = _cut(table)
    for tables in _slices(num_tables, together):
        some = [None if names is None else names[tables] for names in (place, order)]
        steps = _steps(table[tables], stages, *some)
        for columns in _slices(num_columns, width):
            out[tables, :, columns] = _run(table[tables, :, columns], steps)
    return out


def at_once(table: Tensor) -> bool:
    """Tell whether a stack is summed in one call, which has memory of its own for the answer."""
    together, width = _cut(table)
    return together >= len(table) and width >= table.shape[-1]


def _cut(table: Tensor) -> tuple[int, int]:
    """Choose how many tables, and how many of their columns, to work off in one call."""
    num_tables, num_rows, num_columns = table.shape
    if table.device.type != "cpu":
        return num_tables, num_columns
    size = max(1, num_rows * num_columns)
    if size <= WHOLE_ELEMENTS:
        return max(1, STACK_ELEMENTS // size), num_columns
    least, most = BLOCK_COLUMNS
    return 1, min(max(least, BLOCK_ELEMENTS // num_rows), most) // 16 * 16


def _slices(total: int, size: int) -> Iterator[slice]:
    for first in range(0, total, size):
        yield slice(first, min(first + size, total))


def _steps(
    table: Tensor, stages: Sequence[Stage], place: Tensor | None, order: Tensor | None
) -> list[Stage]:
    """Write the stages for all rows of a stack, one table behind the other."""
    num_tables, num_rows, _ = table.shape
    if num_tables == 1 and place is None and order is None:
        return list(stages)
    number = torch.arange(num_tables, device=table.device).unsqueeze(1)
    steps = []
    for step, (row, first) in enumerate(stages):
        rows = row.expand(num_tables, -1)
        if place is not None and step == 0:
            rows = place[:, row]
        if order is not None and step == len(stages) - 1:  # whose bags are of one size
            bags = rows.unflatten(1, (len(first), -1))
            rows = bags.gather(1, order.unsqueeze(-1).expand_as(bags)).flatten(1)
        before, bags_before = num_rows * number, len(row) * number
        steps.append(((rows + before).flatten(), (first + bags_before).flatten()))
        num_rows = len(first)
    return steps


def _run(table: Tensor, steps: Sequence[Stage]) -> Tensor:
    """Sum the rows of (N, rows, S) tables, step by step."""
    rows = table.reshape(-1, table.shape[-1]).contiguous()
    for row, first in steps:
        rows = F.embedding_bag(row, rows, first, mode="sum")
    return rows.view(len(table), len(rows) // len(table), table.shape[-1])
