"""Measure the VC dimension of a mask exactly, and bound that of several reads (appendix on VC).

The rows of a matrix are sets of columns. A set of k columns is shattered if the rows realise all
its 2^k subsets (traces); the VC dimension is the size of the largest shattered set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from smat.geometry.field import check_index

# The rows that realise one trace on the columns chosen so far: how many, and as a bit set.
_Trace = tuple[int, int]

_MAX_COLUMNS = 20  # of the sets that are counted together
_MAX_CELLS = 1 << 20  # of the sets that are counted in one go, times their traces


def vc_dimension(matrix: Tensor) -> int:
    """Return the VC dimension of the rows of a matrix, exactly; only its support counts.

    >>> vc_dimension(torch.ones(6, 6).tril())
    1
    >>> vc_dimension(torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]))
    2
    """
    return len(shattered_set(matrix))


def shattered_set(matrix: Tensor) -> tuple[int, ...]:
    """Return a largest shattered set of columns.

    >>> shattered_set(torch.ones(6, 6).tril())
    (1,)

    Sizes are tried in turn up to floor(log2(number of distinct rows)), until one has no shattered
    set: subsets of shattered sets are shattered.
    """
    distinct_rows = _distinct_rows(matrix)
    num_rows = len(distinct_rows)
    # A column is a bit set of rows. Equal ones get equal labels, so one of them stands for all.
    columns: dict[int, int] = {}
    for index, entries in enumerate(distinct_rows.T.int().tolist()):
        columns.setdefault(int("".join(map(str, entries)), 2), index)
    # Lopsided columns first: they leave the fewest candidates to those that follow.
    ones = {column: column.bit_count() for column in columns}
    candidates = sorted(columns, key=lambda column: min(ones[column], num_rows - ones[column]))
    largest: tuple[int, ...] = ()
    for size in range(1, num_rows.bit_length()):
        found = _extend([(num_rows, (1 << num_rows) - 1)], candidates, size)
        if found is None:
            break
        largest = tuple(sorted(columns[column] for column in found))
    return largest


def _extend(traces: list[_Trace], candidates: list[int], num_missing: int) -> list[int] | None:
    """Choose `num_missing` more columns so that every trace is realised.

    With k columns missing, each new trace must still have 2^(k-1) rows to tell apart, and a column
    that fails here fails for every larger choice. The smallest trace refuses most, and comes first.
    """
    least = 1 << (num_missing - 1)
    splitting = []
    for column in candidates:  # plain loops: the search spends its time here
        for num_rows, rows in traces:
            num_inside = (rows & column).bit_count()
            if num_inside < least or num_rows - num_inside < least:
                break
        else:
            splitting.append(column)
    if len(splitting) < num_missing:
        return None
    if num_missing == 1:
        return splitting[:1]
    for index, column in enumerate(splitting[: len(splitting) - num_missing + 1]):
        halves = [half for _, rows in traces for half in (rows & column, rows & ~column)]
        sized = sorted((half.bit_count(), half) for half in halves)
        rest = _extend(sized, splitting[index + 1 :], num_missing - 1)
        if rest is not None:
            return [column, *rest]
    return None


def count_traces_of_sets(matrix: Tensor, column_sets: Tensor) -> Tensor:
    """Count the traces on each of many sets of columns at once: `(N, k)` -> `(N,)`.

    >>> count_traces_of_sets(torch.ones(6, 6).tril(), torch.tensor([[1, 4], [0, 1]]))
    tensor([3, 2])
    """
    support = _distinct_rows(matrix)
    index = column_sets.to(support.device, torch.long)
    if index.ndim != 2 or index.shape[1] > _MAX_COLUMNS:
        shape = f"(N, k) with k of at most {_MAX_COLUMNS}"
        raise ValueError(f"column_sets must be {shape}, but their shape is {tuple(index.shape)}")
    check_index("columns", index, support.shape[1])
    if bool((index.sort(-1).values.diff(dim=-1) == 0).any()):
        raise ValueError(f"the columns of a set must differ, but they are {index.tolist()}")
    num_subsets = 1 << index.shape[1]
    bits = support.T.int().contiguous()
    num_sets = max(1, _MAX_CELLS // max(num_subsets, len(support)))
    counts = [index.new_zeros(0)]
    for start in range(0, len(index), num_sets):
        sets = index[start : start + num_sets]
        code = torch.zeros(len(sets), len(support), dtype=torch.int, device=support.device)
        for place, column in enumerate(sets.unbind(1)):
            code += bits[column] << place
        realised = torch.zeros(len(sets), num_subsets, dtype=torch.bool, device=support.device)
        counts.append(realised.scatter_(1, code.long(), True).sum(1))
    return torch.cat(counts)


def shatters(matrix: Tensor, columns: Sequence[int] | Tensor) -> bool:
    """Say whether the rows realise every subset of the columns.

    >>> shatters(torch.ones(6, 6).tril(), [3]), shatters(torch.ones(6, 6).tril(), [1, 4])
    (True, False)
    """
    return int(count_traces_of_sets(matrix, torch.as_tensor(columns)[None])) == 1 << len(columns)


def multi_read_vc_bound(vc_dim: int, num_reads: int) -> int:
    """Bound the VC dimension of a mask whose queries read `num_reads` hyperplanes each.

    >>> [multi_read_vc_bound(vc_dim, num_reads=4) for vc_dim in (2, 3, 4)]
    [26, 50, 74]

    The union of k hyperplanes realises at most (e s / D)^(D k) traces on s >= D keys: a shattered
    set of the long-range block has at most the largest s with 2^s <= (e s / D)^(D k), and the two
    causal blocks add at most 2. The paper rounds this up to 25 d - 24 for k = 4. With one read the
    theorem itself gives d, and at d = 1 the mask is causal whatever is read.
    """
    if vc_dim < 1 or num_reads < 1:
        raise ValueError(f"vc_dim and num_reads are 1 or more, but are {vc_dim} and {num_reads}")
    if vc_dim == 1 or num_reads == 1:
        return vc_dim
    size = ambient_dim = vc_dim - 1
    # The excess of the right side is concave and positive at s = D: it changes sign once.
    while size + 1 <= ambient_dim * num_reads * math.log2(math.e * (size + 1) / ambient_dim):
        size += 1
    return size + 2


def _distinct_rows(matrix: Tensor) -> Tensor:
    if matrix.ndim != 2 or len(matrix) == 0:
        raise ValueError(f"a matrix with at least one row is needed, got {tuple(matrix.shape)}")
    # torch refuses to compare rows without entries; they are all equal.
    return torch.unique(matrix != 0, dim=0) if matrix.shape[1] else matrix[:1] != 0
