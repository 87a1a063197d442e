"""Several tokens at once, in any pieces, are one long prefill."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import smat
from tests.ops.smat.decoding import (
    KINDS,
    SCHEDULES,
    decode,
    empty_for,
    make_case,
    prefill,
    snapshot,
    span,
    unchanged,
    worst_row,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::smat.SMatWarning"),
    pytest.mark.usefixtures("thin_shares"),
]


def extend_in_pieces(state, inputs, cuts, inplace):
    edges = [0, *sorted(set(cuts)), inputs["k"].shape[1]]
    outs = []
    for start, stop in itertools.pairwise(edges):
        out, state = state.extend(**span(inputs, start, stop), inplace=inplace)
        outs.append(out)
    return torch.cat(outs, 1), state


@given(
    vc_dim=st.integers(1, 4),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    kind=st.sampled_from(KINDS),
    cuts=st.lists(st.integers(1, 149), max_size=8),
    inplace=st.booleans(),
    harsh=st.booleans(),
    sharing=st.sampled_from(["queries", "values"]),
)
@settings(max_examples=40)
def test_random_pieces_are_one_prefill(vc_dim, schedule, kind, cuts, inplace, harsh, sharing):
    mask = smat.SMatMask(150, vc_dim, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 150, kind, harsh=harsh, sharing=sharing)
    whole, last = prefill(inputs, mask)
    found, state = extend_in_pieces(empty_for(mask, inputs), inputs, cuts, inplace)
    assert worst_row(found, whole) <= 1e-12
    more = make_case(mask, 12, kind, seed=9, sharing=sharing)
    assert worst_row(decode(state, more)[0], decode(last, more)[0]) <= 1e-12


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_extending_leaves_the_old_state_as_it_was(schedule):
    mask = smat.SMatMask(97, 2, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 97, "gated")
    _, state = prefill(span(inputs, 0, 40), mask)
    before = snapshot(state)
    first, _ = state.extend(**span(inputs, 40, 97))
    assert unchanged(state, before)
    again, same = state.extend(**span(inputs, 40, 97), inplace=True)
    assert same is state
    assert torch.equal(first, again)


@pytest.mark.parametrize("schedule", ["rebuilt", "kept", "window", "doubling", "none"])
def test_a_second_turn_may_be_padded(schedule):
    mask = smat.SMatMask(97, 3, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 97, "gated and routed", batch=3)
    generator = torch.Generator().manual_seed(2)
    real = torch.rand(3, 97, generator=generator) < 0.7
    real[2, 50:] = False
    first, state = prefill(span(inputs, 0, 50), mask, attention_mask=real[:, :50])
    second, state = state.extend(**span(inputs, 50, 97), attention_mask=real[:, 50:])
    assert state.positions == real.sum(1).tolist()
    expected = smat.reference_attention(mask=mask, **inputs, attention_mask=real)
    assert worst_row(torch.cat([first, second], 1), expected) <= 1e-12


@pytest.mark.parametrize("schedule", ["window", "odd window", "doubling"])
def test_a_padded_turn_in_the_middle_of_a_fold(schedule):
    mask = smat.SMatMask(197, 3, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 197, "gated", batch=3, heads=4)
    real = torch.ones(3, 197, dtype=torch.bool)
    real[0, 60:70], real[1, 60:95] = False, False
    _, state = decode(empty_for(mask, inputs), inputs, 0, 60)
    assert state.built[0] > 0
    _, state = state.extend(**span(inputs, 60, 100), attention_mask=real[:, 60:100], inplace=True)
    found, state = decode(state, inputs, 100)
    assert state.positions == real.sum(1).tolist()
    expected = smat.reference_attention(mask=mask, **inputs, attention_mask=real)
    assert worst_row(found, expected[:, 100:]) <= 1e-12


def test_few_tokens_touch_few_entries():
    mask = smat.SMatMask(4096, 4, 64, boundary=smat.schedules.window(1024))
    inputs = make_case(mask, 40, batch=1)
    _, state = empty_for(mask, inputs).extend(**inputs)
    assert mask.geometry.num_profiles > 80
    touched = (state.tensors["profile_table"] != 0).flatten(-2).any(-1).sum(-1)
    assert touched[0].tolist() == [[40, 40]]


def test_no_tokens_at_all():
    mask = smat.SMatMask(97, 2, 8)
    inputs = make_case(mask, 20)
    _, state = prefill(inputs, mask)
    out, after = state.extend(**span(inputs, 20, 20))
    assert out.shape == (2, 0, 4, 3)
    assert after.positions == [20, 20]
