"""Cells from tokens, hyperplanes from a direction and a cell, and the rule for several cells."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smat.geometry import Geometry
from smat.masks import SMatMask, TokenHash, agreeing_direction, type_through_cell

GEOMETRIES = st.sampled_from([(1, 2), (2, 5), (3, 2), (3, 3), (3, 5), (4, 3), (5, 2)]).map(
    lambda sizes: Geometry(*sizes)
)


def table_of(token_hash):
    """List the cell of every token in every head, (H, vocab_size)."""
    return token_hash.profile(torch.arange(token_hash.vocab_size)[None])[0].T


def test_equal_tokens_share_a_cell_in_each_head_and_heads_differ():
    geometry = Geometry(vc_dim=3, field_size=11)
    token_hash = TokenHash(vocab_size=500, num_heads=4, geometry=geometry, seed=3)
    token_ids = torch.randint(500, (2, 60), generator=torch.Generator().manual_seed(0))
    cells = token_hash.profile(token_ids)
    assert cells.shape == (2, 60, 4)
    assert cells.dtype == torch.int64
    table = table_of(token_hash)
    for b, t, h in itertools.product(range(2), range(60), range(4)):
        assert cells[b, t, h] == table[h, token_ids[b, t]]
    assert all(not torch.equal(table[0], table[head]) for head in range(1, 4))


def test_hash_is_fixed_by_its_seed_and_spreads_over_all_cells():
    geometry = Geometry(vc_dim=3, field_size=5)
    sizes = {"vocab_size": 4000, "num_heads": 2, "geometry": geometry}
    table = table_of(TokenHash(**sizes, seed=0))
    assert torch.equal(table, table_of(TokenHash(**sizes, seed=0)))
    assert not torch.equal(table, table_of(TokenHash(**sizes, seed=1)))
    counts = torch.bincount(table[0], minlength=25)
    assert len(counts) == 25
    # 160 tokens a cell are expected, with a standard deviation of 12.4.
    assert counts.min() > 160 - 5 * 12.4
    assert counts.max() < 160 + 5 * 12.4


def test_a_caller_cannot_spoil_the_hash():
    token_hash = TokenHash(10, 1, Geometry(2, 5))
    table_of(token_hash).zero_()
    assert table_of(token_hash).any()


@settings(max_examples=40, deadline=None)
@given(GEOMETRIES)
def test_the_hyperplane_through_a_cell_holds_it_and_keeps_its_direction(geometry):
    num_directions = max(1, geometry.num_directions)
    direction = torch.arange(num_directions)[:, None]
    profile = torch.arange(geometry.num_profiles)[None, :]
    query_type = type_through_cell(geometry, direction, profile)
    incidence = geometry.incidence()
    assert incidence[query_type, profile.expand_as(query_type)].all()
    assert torch.equal(query_type // geometry.field_size, direction.expand_as(query_type))


def test_a_content_based_query_sees_every_distant_key_that_repeats_its_token():
    mask = SMatMask(128, 3, 16)
    token_hash = TokenHash(30, 2, mask.geometry)
    token_ids = torch.randint(30, (1, 128), generator=torch.Generator().manual_seed(5))
    profile = token_hash.profile(token_ids)
    direction = torch.randint(mask.geometry.num_directions, profile.shape)
    query_type = type_through_cell(mask.geometry, direction, profile)
    dense = mask.dense(profile=profile, query_type=query_type)
    repeats = token_ids[0, :, None] == token_ids[0, None, :]
    assert dense[0][:, repeats.tril()].all()
    assert not dense[0, 0, 64:, :64].all()


@settings(max_examples=80, deadline=None)
@given(GEOMETRIES, st.integers(1, 5), st.integers(0, 10**6))
def test_agreeing_direction_is_the_first_that_agrees(geometry, num_cells, seed):
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randint(geometry.num_profiles, (4, 3, num_cells), generator=generator)
    direction, exists = agreeing_direction(geometry, cells)
    assert direction.shape == exists.shape == (4, 3)
    points, directions = geometry.points(), geometry.directions()
    for row, column in itertools.product(range(4), range(3)):
        offsets = (points[cells[row, column]] @ directions.T) % geometry.field_size
        agreeing = (offsets == offsets[:1]).all(0).nonzero().flatten().tolist()
        if geometry.vc_dim == 1:
            agreeing = [0]
        assert bool(exists[row, column]) == bool(agreeing)
        assert int(direction[row, column]) == (agreeing[0] if agreeing else 0)


@pytest.mark.parametrize(("vc_dim", "field_size"), [(2, 23), (3, 11), (4, 5)])
def test_as_many_cells_as_coordinates_always_agree(vc_dim, field_size):
    geometry = Geometry(vc_dim, field_size)
    generator = torch.Generator().manual_seed(0)
    cells = torch.randint(geometry.num_profiles, (2000, vc_dim - 1), generator=generator)
    direction, exists = agreeing_direction(geometry, cells)
    assert exists.all()
    query_type = type_through_cell(geometry, direction[:, None], cells)
    assert torch.equal(query_type, query_type[:, :1].expand_as(query_type))
    one_more = torch.randint(geometry.num_profiles, (2000, vc_dim), generator=generator)
    assert not agreeing_direction(geometry, one_more)[1].all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TokenHash(0, 1, Geometry(2, 5)), "vocab_size must be 1 or more, but it is 0"),
        (lambda: TokenHash(9, 0, Geometry(2, 5)), "num_heads must be 1 or more, but it is 0"),
        (lambda: TokenHash(9, 1, Geometry(2, 5)).profile(torch.tensor([[9]])), r"0\.\.8.*9"),
        (lambda: TokenHash(9, 1, Geometry(2, 5)).profile(torch.tensor([9])), r"\(1,\)"),
        (lambda: TokenHash(9, 1, Geometry(2, 5)).profile(torch.tensor([[0.5]])), "float32"),
        (lambda: agreeing_direction(Geometry(2, 5), torch.tensor([[5]])), r"0\.\.4.*5"),
        (lambda: agreeing_direction(Geometry(2, 5), torch.zeros(3, 0).long()), r"\(3, 0\)"),
    ],
)
def test_bad_input_is_refused_with_its_numbers(build, message):
    with pytest.raises(ValueError, match=message):
        build()
