"""The mask against its definition in the paper, its laws over lengths, and what it refuses."""

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from smat.masks import SMatMask, doubling, kept, none, rebuilt, window

pytestmark = pytest.mark.filterwarnings("ignore::smat.masks.SMatWarning")

CHUNKS = st.integers(1, 24)
VC_DIMS = st.integers(1, 4)


@st.composite
def masks(draw, max_length=90, vc_dims=VC_DIMS):
    seq_len = draw(st.integers(1, max_length))
    schedules = st.one_of(
        st.sampled_from([None, none(), rebuilt(), doubling()]),
        st.integers(0, seq_len).map(kept),
        st.integers(1, seq_len + 5).map(window),
    )
    field_size = draw(st.sampled_from([None, None, 2, 3, 5]))
    return SMatMask(seq_len, draw(vc_dims), draw(CHUNKS), field_size, draw(schedules))


@st.composite
def moving_masks(draw):
    schedule = draw(st.one_of(st.just(doubling()), st.integers(1, 40).map(window)))
    return SMatMask(draw(st.integers(2, 80)), draw(VC_DIMS), draw(CHUNKS), boundary=schedule)


def paper_hyperplanes(field_size, ambient_dim):
    """All (direction, offset) in the order of the public contract, by plain enumeration."""
    if ambient_dim == 0:
        return [((), 0)]
    vectors = itertools.product(range(field_size), repeat=ambient_dim)
    normalised = [v for v in vectors if any(v) and next(x for x in v if x) == 1]
    normalised.sort(key=lambda v: (next(i for i, x in enumerate(v) if x), v))
    return [(v, offset) for v in normalised for offset in range(field_size)]


def paper_mask(mask, length):
    """The mask entry by entry as the paper writes it, positions counted from 1."""
    field_size, ambient_dim = mask.geometry.field_size, mask.vc_dim - 1
    points = list(itertools.product(range(field_size), repeat=ambient_dim))
    hyperplanes = paper_hyperplanes(field_size, ambient_dim)
    entries = torch.zeros(length, length, dtype=torch.bool)
    for t, j in itertools.product(range(1, length + 1), repeat=2):
        n = mask.schedule.boundary_at(t - 1)
        i = t if mask.boundary.moves else t - n
        direction, offset = hyperplanes[i % len(hyperplanes)]
        point = points[(j - 1) % len(points)]
        on_plane = sum(a * x for a, x in zip(direction, point, strict=True)) % field_size == offset
        entries[t - 1, j - 1] = j <= t and (j > n or on_plane)
    return entries


@settings(max_examples=60, deadline=None)
@given(masks(max_length=40, vc_dims=st.integers(1, 3)))
def test_dense_is_the_papers_mask(mask):
    assert torch.equal(mask.dense(), paper_mask(mask, mask.seq_len))


@settings(max_examples=100, deadline=None)
@given(masks())
def test_causal_with_unit_diagonal(mask):
    dense = mask.dense()
    length = mask.seq_len
    assert dense.shape == (length, length)
    assert dense.dtype == torch.bool
    assert not dense.triu(1).any()
    assert dense.diagonal().all()
    if not mask.boundary.moves:
        assert dense.sum() >= length**2 / 4


@settings(max_examples=40, deadline=None)
@given(masks(vc_dims=st.just(1)))
def test_one_dimension_is_the_causal_mask_under_every_schedule(mask):
    assert torch.equal(mask.dense(), torch.ones(mask.seq_len, mask.seq_len).tril().bool())


@settings(max_examples=60, deadline=None)
@given(masks(), st.data())
def test_shorter_inputs_mean_the_leading_block(mask, data):
    length = data.draw(st.integers(1, mask.seq_len))
    assert torch.equal(mask.dense(length), mask.dense()[:length, :length])


@settings(max_examples=60, deadline=None)
@given(moving_masks(), st.integers(1, 160))
def test_moving_masks_of_all_lengths_are_leading_blocks_of_one(mask, length):
    other = mask.for_length(length)
    assert other.geometry == mask.geometry
    shorter = min(length, mask.seq_len)
    assert torch.equal(other.dense(shorter), mask.dense(shorter))
    assert torch.equal(mask.dense(length), other.dense())


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 90), VC_DIMS, CHUNKS)
def test_schedules_that_never_move_equal_the_fixed_mask(seq_len, vc_dim, chunk_size):
    fixed = SMatMask(seq_len, vc_dim, chunk_size)
    same = kept(fixed.num_distant)
    for boundary in (same, rebuilt()):
        other = SMatMask(seq_len, vc_dim, chunk_size, boundary=boundary)
        assert other.geometry == fixed.geometry
        assert torch.equal(other.dense(), fixed.dense())
    causal = torch.ones(seq_len, seq_len).tril().bool()
    assert torch.equal(SMatMask(seq_len, vc_dim, boundary=none()).dense(), causal)
    assert torch.equal(SMatMask(seq_len, vc_dim, boundary=window(seq_len)).dense(), causal)


@settings(max_examples=60, deadline=None)
@given(masks(), st.integers(1, 200), st.integers(1, 200))
def test_for_length_forgets_where_it_came_from(mask, first, second):
    assert mask.for_length(first).for_length(second) == mask.for_length(second)
    assert mask.for_length(first).boundary == mask.boundary


def test_for_length_derives_the_field_again_only_where_the_boundary_follows_the_length():
    assert SMatMask(1024, 3).for_length(256).geometry.field_size == 7
    assert SMatMask(1024, 3, field_size=13).for_length(256).geometry.field_size == 13
    for boundary in (kept(512), window(256), doubling()):
        mask = SMatMask(1024, 3, boundary=boundary)
        assert mask.geometry.field_size == mask.for_length(64).geometry.field_size == 11
        assert mask.for_length(8192).geometry.field_size == 11


def test_a_kept_boundary_longer_than_the_sequence_is_plain_causal():
    short = SMatMask(1024, 3, boundary=kept(512)).for_length(100)
    assert torch.equal(short.dense(), torch.ones(100, 100).tril().bool())
    assert (short.num_distant, short.num_recent) == (0, 100)


@pytest.mark.parametrize(
    ("seq_len", "vc_dim", "numbers"),
    # q, P, B, n of the published cache sizes and bucket counts.
    [
        (1024, 3, (11, 121, 132, 512)),
        (1024, 4, (5, 125, 155, 512)),
        (262144, 2, (367, 367, 367, 131072)),
        (262144, 4, (23, 12167, 12719, 131072)),
    ],
)
def test_published_sizes(seq_len, vc_dim, numbers):
    mask = SMatMask(seq_len, vc_dim)
    geometry = mask.geometry
    found = (geometry.field_size, geometry.num_profiles, geometry.num_types, mask.num_distant)
    assert found == numbers


@pytest.mark.parametrize("vc_dim", [2, 3, 4])
def test_a_query_of_a_long_mask_sees_one_distant_key_in_q(vc_dim):
    mask = SMatMask(262144, vc_dim)
    num_distant, num_recent = mask.num_distant, mask.num_recent
    num_keys = mask.profile(torch.arange(num_distant)).bincount().double()
    num_seen = mask.geometry.tabulate(num_keys[:, None]).flatten()
    total = num_seen[mask.query_type(torch.arange(num_distant, mask.seq_len))].sum().item()
    # A hyperplane holds one point in q, so the long-range block is 1/q full up to a remainder.
    share = total / (num_distant * num_recent)
    assert share == pytest.approx(1 / mask.geometry.field_size, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(masks())
def test_plain_data_pickle_and_hash(mask):
    assert SMatMask.from_dict(mask.to_dict()) == mask
    assert pickle.loads(pickle.dumps(mask)) == mask == copy.deepcopy(mask)
    assert len({mask, SMatMask.from_dict(mask.to_dict())}) == 1
    with pytest.raises(AttributeError):
        mask.seq_len = 3


def test_description_names_every_number():
    described = SMatMask(1024, 3, boundary=window(256)).describe()
    expected = "T = 1024, d = 3, q = 11, n = 512, c = 64, boundary = window(step=256)"
    assert described == f"SMatMask: {expected}"


@settings(max_examples=100, deadline=None)
@given(masks())
def test_guarantee_is_the_proofs_condition(mask):
    assume(mask.vc_dim > 1)
    geometry = mask.geometry
    fits = geometry.num_profiles <= mask.num_distant and 2 * geometry.num_types <= mask.num_recent
    assert mask.guarantees_vc_dim == (fits and not mask.boundary.moves)
