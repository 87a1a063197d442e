"""Properties of SMat masks: causal, unit diagonal, M^(1) = L_T, VC(M^(d)) = d, nnz = Theta(T^2)."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smat.masks import SMatMask, count_traces_of_sets, shatters, vc_dimension

pytestmark = pytest.mark.filterwarnings("ignore::smat.masks.SMatWarning")

# Chunks of 9 place the boundary where q = 3 is enough at T = 64, so that d = 3 fits there too.
CASES = [
    (seq_len, vc_dim, chunk_size)
    for seq_len, chunk_size in [(64, 16), (64, 9), (128, 16), (128, 9), (256, 64)]
    for vc_dim in (1, 2, 3)
]
EXCLUDED = [(64, 3, 16)]  # 2B = 60 > m = 32


def witness_columns(mask):
    """The proof's set: keys with the basis points as profiles, and the recent key B + 1."""
    tau = mask.num_distant + mask.geometry.num_types
    return [*mask.geometry.basis_profiles().tolist(), tau]


@pytest.mark.parametrize("case", [case for case in CASES if case not in EXCLUDED])
def test_vc_dimension_is_exactly_d(case):
    mask = SMatMask(*case)
    assert mask.guarantees_vc_dim
    assert mask.num_distant > 0
    assert vc_dimension(mask.dense()) == mask.vc_dim


@pytest.mark.parametrize("case", EXCLUDED)
def test_only_the_constraints_exclude_a_case(case):
    mask = SMatMask(*case)
    too_many = 2 * mask.geometry.num_types > mask.num_recent
    assert too_many or mask.geometry.num_profiles > mask.num_distant
    assert vc_dimension(mask.dense()) <= mask.vc_dim


@settings(max_examples=25, deadline=None)
@given(st.integers(12, 80), st.integers(2, 3), st.integers(1, 20), st.sampled_from([None, 2, 3, 5]))
def test_vc_dimension_is_d_wherever_the_proof_applies(seq_len, vc_dim, chunk_size, field_size):
    mask = SMatMask(seq_len, vc_dim, chunk_size, field_size)
    assume(mask.num_distant > 0)
    dimension = vc_dimension(mask.dense())
    assert dimension <= vc_dim
    if mask.guarantees_vc_dim:
        assert dimension == vc_dim
        assert shatters(mask.dense(), witness_columns(mask))


@settings(max_examples=25, deadline=None)
@given(st.integers(8, 60), st.integers(2, 3), st.sampled_from([2, 3, 5]), st.integers(0, 10**6))
def test_no_assignment_exceeds_d(seq_len, vc_dim, field_size, seed):
    mask = SMatMask(seq_len, vc_dim, 4, field_size)
    generator = torch.Generator().manual_seed(seed)
    shape = (1, seq_len, 1)
    profile = torch.randint(mask.geometry.num_profiles, shape, generator=generator)
    query_type = torch.randint(mask.geometry.num_types, shape, generator=generator)
    dense = mask.dense(profile=profile, query_type=query_type)
    assert vc_dimension(dense[0, 0]) <= vc_dim


def test_four_dimensions_first_fit_at_1024():
    lengths = [2**exponent for exponent in range(4, 11)]
    assert [SMatMask(length, 4, 8).guarantees_vc_dim for length in lengths] == [False] * 6 + [True]


def test_four_dimensions_shatter_the_witness_and_no_five_random_columns():
    mask = SMatMask(1024, 4)
    dense = mask.dense()
    columns = witness_columns(mask)
    assert len(columns) == 4
    assert shatters(dense, columns)
    generator = torch.Generator().manual_seed(0)
    sets = torch.cat(
        [torch.rand(20_000, 1024, generator=generator).topk(5, dim=1).indices for _ in range(5)]
    )
    assert sets.shape == (100_000, 5)
    assert count_traces_of_sets(dense, sets).max() < 32
    # The sample is large enough to hit shattered sets where there are any.
    assert count_traces_of_sets(dense, sets[:20_000, :4]).max() == 16


def test_four_dimensions_at_256_hold_although_the_proof_does_not_reach_them():
    mask = SMatMask(256, 4)
    assert not mask.guarantees_vc_dim
    assert vc_dimension(mask.dense()) == 4


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 200), st.integers(1, 4), st.integers(1, 64))
def test_causal_with_unit_diagonal_and_quadratically_many_entries(seq_len, vc_dim, chunk_size):
    mask = SMatMask(seq_len, vc_dim, chunk_size)
    dense = mask.dense()
    assert not dense.triu(1).any()
    assert dense.diagonal().all()
    num_distant, num_recent = mask.num_distant, mask.num_recent
    triangles = (num_distant * (num_distant + 1) + num_recent * (num_recent + 1)) // 2
    assert seq_len**2 / 4 <= triangles <= int(dense.sum()) <= seq_len * (seq_len + 1) // 2
    assert dense[:num_distant, :num_distant].sum() == num_distant * (num_distant + 1) // 2
    assert dense[num_distant:, num_distant:].sum() == num_recent * (num_recent + 1) // 2


@pytest.mark.parametrize("seq_len", [1, 2, 64, 257])
@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_the_first_mask_is_the_causal_triangle(seq_len, chunk_size):
    causal = torch.ones(seq_len, seq_len).tril().bool()
    assert torch.equal(SMatMask(seq_len, 1, chunk_size).dense(), causal)
