"""Sums and reads by group, against loops over tokens, and each other's adjoints."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smat.ops.smat.groups import (
    MAX_PADDED,
    MAX_SLOTS,
    SPARE_SLOTS,
    PeriodicGroups,
    SortedGroups,
    VisitOrder,
    cut_runs,
)
from tests.ops.smat.comparison import poisoned_memory

SHAPES = [(1, 1, 3), (1, 17, 5), (3, 17, 5), (2, 10, 5), (2, 4, 9), (3, 20, 1)]


def normal(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def groupings(num_rows, length, num_groups):
    """List (grouping, group of every token), positional and by content."""
    for first in (0, 2, num_groups + 1):
        index = (torch.arange(length) + first) % num_groups
        yield PeriodicGroups(num_groups, first), index.expand(num_rows, -1)
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(num_groups, (num_rows, length), generator=generator)
    yield SortedGroups(index, num_groups), index
    lonely = torch.full_like(index, num_groups - 1)
    yield SortedGroups(lonely, num_groups), lonely


@pytest.mark.parametrize(("num_rows", "length", "num_groups"), SHAPES)
def test_products_equal_loops(num_rows, length, num_groups):
    left, right = normal(num_rows, length, 4), normal(num_rows, length, 3, seed=1)
    table = normal(num_rows, num_groups, 4, 3, seed=2)
    for groups, index in groupings(num_rows, length, num_groups):
        sums = torch.zeros_like(table)
        read, read_left = torch.zeros_like(right), torch.zeros_like(left)
        for row in range(num_rows):
            for token, group in enumerate(index[row].tolist()):
                sums[row, group] += torch.outer(left[row, token], right[row, token])
                state = table[row, group]
                read[row, token] = left[row, token] @ state
                read_left[row, token] = state @ right[row, token]
        with poisoned_memory():
            found = groups.pool(left, right), groups.read(left, table)
            found_left = groups.read(right, table.mT)
        torch.testing.assert_close(found[0], sums, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(found[1], read, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(found_left, read_left, rtol=1e-13, atol=1e-13)


def test_groups_beside_groups_without_visits():
    index = (128 + torch.arange(300) % 128).expand(2, -1)
    groups = SortedGroups(index, num_groups=300)
    left, right = normal(2, 300, 4), normal(2, 300, 3, seed=1)
    sums = torch.zeros(2, 300, 4, 3, dtype=torch.float64)
    for row in range(2):
        sums[row].index_add_(0, index[row], left[row].unsqueeze(-1) * right[row].unsqueeze(-2))
    with poisoned_memory():
        found = groups.pool(left, right)
        read = groups.read(left, sums)
    torch.testing.assert_close(found, sums, rtol=1e-13, atol=1e-13)
    expected = torch.stack(
        [torch.einsum("tr,trp->tp", left[row], sums[row, index[row]]) for row in range(2)]
    )
    torch.testing.assert_close(read, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("num_rows", "length", "num_groups"), SHAPES)
def test_reading_is_the_adjoint_of_summing(num_rows, length, num_groups):
    left, right = normal(num_rows, length, 4), normal(num_rows, length, 3, seed=1)
    table = normal(num_rows, num_groups, 4, 3, seed=2)
    for groups, _ in groupings(num_rows, length, num_groups):
        through_sum = (groups.pool(left, right) * table).sum()
        torch.testing.assert_close((groups.read(left, table) * right).sum(), through_sum)
        torch.testing.assert_close((groups.read(right, table.mT) * left).sum(), through_sum)


def test_strided_views_of_features():
    """The op hands over slices of features and of time."""
    wide, table = normal(2, 9, 8), normal(2, 4, 3, 5)
    left, right = wide[..., 2:5], normal(2, 12, 5)[:, 3:]
    for groups, _ in groupings(2, 9, 4):
        assert not left.is_contiguous()
        first = groups.pool(left, right)
        second = groups.pool(left.contiguous(), right.contiguous())
        assert torch.equal(first, second)
        assert torch.equal(groups.read(left, table), groups.read(left.contiguous(), table))
        assert torch.equal(groups.read(right, table.mT), groups.read(right.contiguous(), table.mT))


@given(st.lists(st.integers(0, 3000), max_size=60))
def test_runs_cover_all_groups_with_little_padding(sizes):
    runs = list(cut_runs(sizes))
    groups = visits = slots = 0
    for run in runs:
        inside = sizes[run.groups]
        assert run.width == max(inside)
        assert (run.groups.start, run.visits.start, run.slots.start) == (groups, visits, slots)
        groups, visits, slots = run.groups.stop, run.visits.stop, run.slots.stop
        assert visits - run.visits.start == sum(inside)
        assert slots - run.slots.start == run.width * len(inside)
        if len(inside) > 1:
            most = min(MAX_SLOTS, MAX_PADDED * sum(inside) + SPARE_SLOTS)
            assert slots - run.slots.start <= most
    assert (groups, visits) == (len(sizes), sum(sizes))


def test_groups_in_order_of_size_need_few_runs():
    index = torch.randint(200, (1, 20000), generator=torch.Generator().manual_seed(0))
    index = (index * index // 200) % 200  # groups of very different sizes
    in_order = VisitOrder.of(index, 200).rename(index)
    runs = [SortedGroups(x, 200).runs for x in (index, in_order)]
    slots = [each[-1].slots.stop for each in runs]
    assert len(runs[1]) < len(runs[0])
    assert slots[1] <= 1.3 * 20000


@given(st.integers(1, 4), st.integers(0, 30), st.integers(1, 9), st.randoms(use_true_random=False))
def test_an_order_renames_groups_by_falling_size(num_rows, length, num_groups, random):
    index = torch.tensor(
        [[random.randrange(num_groups) for _ in range(length)] for _ in range(num_rows)],
        dtype=torch.long,
    ).view(num_rows, length)
    order = VisitOrder.of(index, num_groups)
    each = torch.arange(num_groups).expand(num_rows, -1)
    assert torch.equal(order.rename(order.group), each)
    for row, name in zip(index, order.rename(index), strict=True):
        sizes = torch.bincount(name, minlength=num_groups)
        assert torch.equal(
            sizes, torch.bincount(row, minlength=num_groups).sort(descending=True)[0]
        )


def test_a_stranger_that_is_not_a_number_spoils_its_own_groups_only():
    index = torch.tensor([[0, 2, 2, 5, 5, 5, 5]])  # groups of 1, 2 and 4 visits, three without any
    left, right = normal(1, 7, 4), normal(1, 7, 3, seed=1)
    for spoiled in range(7):
        for side in (left, right):
            kept = side[0, spoiled].clone()
            side[0, spoiled] = torch.nan
            sums = SortedGroups(index, 6).pool(left, right)[0]
            side[0, spoiled] = kept
            spoiled_groups = sums.isnan().flatten(1).any(1).nonzero().flatten().tolist()
            assert spoiled_groups == [index[0, spoiled]]
