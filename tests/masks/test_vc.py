"""The exact VC dimension against brute force, and the counts of traces."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smat.masks import SMatMask, count_traces_of_sets, shatters, vc_dimension, window
from smat.masks.vc import shattered_set


@st.composite
def matrices(draw):
    rows = draw(st.integers(1, 40))
    columns = draw(st.integers(1, 8))
    density = draw(st.sampled_from([0.2, 0.5, 0.8]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    return torch.rand(rows, columns, generator=generator) < density


def brute_traces(matrix, columns):
    return {tuple(bool(row[column]) for column in columns) for row in matrix.tolist()}


def brute_vc_dimension(matrix):
    sizes = range(matrix.shape[1], 0, -1)
    for size in sizes:
        for columns in itertools.combinations(range(matrix.shape[1]), size):
            if len(brute_traces(matrix, columns)) == 2**size:
                return size
    return 0


@settings(max_examples=150, deadline=None)
@given(matrices())
def test_equals_brute_force_and_shows_its_witness(matrix):
    dimension = brute_vc_dimension(matrix)
    assert vc_dimension(matrix) == dimension
    witness = shattered_set(matrix)
    assert len(witness) == dimension
    assert list(witness) == sorted(set(witness))
    assert len(brute_traces(matrix, witness)) == 2**dimension


@settings(max_examples=60, deadline=None)
@given(matrices(), st.data())
def test_counts_are_those_of_the_rows(matrix, data):
    columns = data.draw(st.lists(st.integers(0, matrix.shape[1] - 1), min_size=1, unique=True))
    expected = len(brute_traces(matrix, columns))
    assert count_traces_of_sets(matrix, torch.tensor([columns, columns[::-1]])).tolist() == [
        expected,
        expected,
    ]
    assert shatters(matrix, columns) == (expected == 2 ** len(columns))


@pytest.mark.parametrize("num_columns", range(6))
def test_all_subsets_are_shattered_until_one_is_missing(num_columns):
    every = torch.tensor(list(itertools.product([0, 1], repeat=num_columns)))
    every = every.reshape(2**num_columns, num_columns)
    assert vc_dimension(every) == num_columns
    assert shattered_set(every) == tuple(range(num_columns))
    if num_columns:
        assert vc_dimension(every[1:]) == num_columns - 1


def test_repeated_rows_and_columns_add_nothing():
    matrix = torch.ones(5, 5).tril()
    doubled = matrix.repeat_interleave(3, dim=0).repeat_interleave(4, dim=1)
    assert vc_dimension(doubled) == vc_dimension(matrix) == 1


def test_a_gated_mask_counts_by_its_support():
    mask = SMatMask(64, 2, 16)
    log_decay = torch.full((1, 64, 1), -0.25, dtype=torch.float64)
    assert vc_dimension(mask.dense(log_decay=log_decay)[0, 0]) == 2


def test_a_moving_boundary_can_shatter_more_columns_than_d():
    mask = SMatMask(96, 2, 8, boundary=window(16))
    assert vc_dimension(mask.dense()) == 3
    assert not mask.guarantees_vc_dim


def test_many_sets_are_counted_in_blocks_as_one_by_one():
    matrix = SMatMask(128, 3, 16).dense()
    sets = (
        torch.rand(20_000, 128, generator=torch.Generator().manual_seed(2)).topk(4, dim=1).indices
    )
    counts = count_traces_of_sets(matrix, sets)
    picked = range(0, 20_000, 977)
    alone = [len(brute_traces(matrix, sets[i].tolist())) for i in picked]
    assert [int(counts[i]) for i in picked] == alone
    assert count_traces_of_sets(matrix, sets[:0]).shape == (0,)


def test_the_empty_set_is_shattered():
    assert shatters(torch.ones(2, 2), [])
    assert shattered_set(torch.ones(3, 3)) == ()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: vc_dimension(torch.ones(3)), r"\(3,\)"),
        (lambda: vc_dimension(torch.ones(0, 3)), r"\(0, 3\)"),
        (lambda: shatters(torch.ones(3, 3), [3]), r"0\.\.2.*3"),
        (lambda: shatters(torch.ones(3, 3), [-1]), "-1"),
        (lambda: shatters(torch.ones(3, 3), [1, 1]), r"\[1, 1\]"),
        (lambda: shatters(torch.ones(3, 3), torch.tensor([[0, 1]])), r"\(1, 1, 2\)"),
        (lambda: count_traces_of_sets(torch.ones(3, 3), torch.tensor([0, 1])), r"\(2,\)"),
        (lambda: count_traces_of_sets(torch.ones(3, 30), torch.arange(21)[None]), "20"),
    ],
)
def test_bad_input_is_refused_with_its_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()
