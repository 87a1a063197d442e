"""Decoding is prefill, token by token: at every position, under every schedule."""

import itertools
import warnings

import pytest
import torch

import smat
from tests.ops.smat.comparison import mild_gates, poisoned_memory
from tests.ops.smat.decoding import (
    KINDS,
    SCHEDULES,
    at,
    decode,
    empty_for,
    make_case,
    prefill,
    span,
    worst_row,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::smat.SMatWarning"),
    pytest.mark.usefixtures("thin_shares"),
]


# Every kind meets every dimension and, over the dimensions, every schedule.
CASES = [
    pytest.param(vc_dim, name, KINDS[(vc_dim + place) % 4], id=f"{vc_dim}-{name}")
    for vc_dim in (1, 2, 3, 4)
    for place, name in enumerate(SCHEDULES)
]


def check_steps_from_nothing(seq_len, vc_dim, schedule, kind, fold):
    mask = smat.SMatMask(seq_len, vc_dim, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, seq_len, kind)
    expected = smat.reference_attention(mask=mask, **inputs)
    with poisoned_memory():
        found, _ = decode(empty_for(mask, inputs, fold=fold), inputs)
    assert worst_row(found, expected) <= 1e-12


@pytest.mark.parametrize(("vc_dim", "schedule", "kind"), CASES)
def test_steps_from_nothing_equal_the_dense_mask(vc_dim, schedule, kind):
    check_steps_from_nothing(97, vc_dim, schedule, kind, "spread")


@pytest.mark.parametrize(("vc_dim", "schedule", "kind"), CASES[::5])
def test_longer_sequences_too(vc_dim, schedule, kind):
    check_steps_from_nothing(256, vc_dim, schedule, kind, "spread")


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [97, 256])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
def test_steps_from_nothing_equal_the_dense_mask_everywhere(seq_len, vc_dim, schedule, kind):
    check_steps_from_nothing(seq_len, vc_dim, schedule, kind, "spread")
    check_steps_from_nothing(seq_len, vc_dim, schedule, kind, "at_once")


def check_every_split(seq_len, vc_dim, schedule, kind, num_steps, rest_every=1):
    """Prefill up to each split, step on from there, and let `extend` do the rest of some."""
    mask = smat.SMatMask(seq_len, vc_dim, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, seq_len, kind, batch=1, heads=1)
    whole, _ = smat.smat_attention(mask=mask, **inputs)
    for split in range(1, seq_len):
        out, state = prefill(span(inputs, 0, split), mask)
        assert worst_row(out, whole[:, :split]) <= 1e-12
        stop = min(split + num_steps, seq_len)
        steps, state = decode(state, inputs, split, stop)
        assert worst_row(steps, whole[:, split:stop]) <= 1e-12
        assert state.positions == [stop]
        if stop < seq_len and split % rest_every == 0:
            rest, state = state.extend(**span(inputs, stop, seq_len))
            assert worst_row(rest, whole[:, stop:]) <= 1e-12
            assert state.positions == [seq_len]


@pytest.mark.parametrize(
    ("vc_dim", "schedule", "kind"),
    [case for case in CASES[1::3] if case.values[1] != "shortest window"],
)
def test_prefill_steps_and_extension_agree_at_every_split(vc_dim, schedule, kind):
    check_every_split(97, vc_dim, schedule, kind, num_steps=2, rest_every=8)


@pytest.mark.slow
@pytest.mark.parametrize("seq_len", [97, 256])
@pytest.mark.parametrize(("vc_dim", "schedule", "kind"), CASES)
def test_prefill_steps_and_extension_agree_at_every_split_everywhere(
    seq_len, vc_dim, schedule, kind
):
    check_every_split(seq_len, vc_dim, schedule, kind, num_steps=3)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gates_of_every_size_and_full_resets(schedule):
    mask = smat.SMatMask(97, 3, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 97, "gated", harsh=True)
    found, _ = decode(empty_for(mask, inputs), inputs)
    assert worst_row(found, smat.reference_attention(mask=mask, **inputs)) <= 1e-12


def test_small_gates_keep_their_digits_after_large_ones():
    mask = smat.SMatMask(450, 2, 8, boundary=smat.schedules.window(16))
    inputs = make_case(mask, 450, batch=1, heads=1)
    gates = mild_gates(inputs["k"].shape[:3])
    gates[:, :400] -= 777.7  # lambda falls to -3e5, where fp64 alone keeps 10 digits of it
    inputs["log_decay"] = gates
    expected = smat.reference_attention(mask=mask, **inputs)[:, 400:]
    steps, _ = decode(empty_for(mask, inputs), inputs)
    assert worst_row(steps[:, 400:], expected) <= 1e-13
    at_once, _ = empty_for(mask, inputs).extend(**inputs)
    assert worst_row(at_once[:, 400:], expected) <= 1e-13


def test_gates_that_come_late():
    mask = smat.SMatMask(97, 2, 8, boundary=smat.schedules.window(16))
    inputs = make_case(mask, 97)
    late = mild_gates(inputs["k"].shape[:3])
    late[:, :41] = 0
    expected = smat.reference_attention(mask=mask, log_decay=late, **inputs)
    first, state = decode(empty_for(mask, inputs), inputs, 0, 41)
    assert "log_decay" not in state.tensors
    rest, _ = decode(state, inputs | {"log_decay": late}, 41)
    assert worst_row(torch.cat([first, rest], 1), expected) <= 1e-12


@pytest.mark.parametrize("vc_dim", [2, 3, 4])
@pytest.mark.parametrize("schedule", ["window", "odd window", "shortest window", "doubling"])
def test_a_fold_that_is_spread_gives_the_bits_of_one_at_once(vc_dim, schedule):
    mask = smat.SMatMask(97, vc_dim, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 97, "gated and routed")
    outs = [decode(empty_for(mask, inputs, fold=fold), inputs)[0] for fold in ("spread", "at_once")]
    assert torch.equal(*outs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", ["rebuilt", "kept", "window", "doubling", "none"])
def test_rows_of_a_padded_batch_go_on_from_their_own_positions(schedule, kind):
    mask = smat.SMatMask(97, 3, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 90, kind, batch=4)
    real = torch.ones(4, 50, dtype=torch.long)
    real[0, :23], real[1, 31:], real[3] = 0, 0, 0  # left, right, none, all of it
    lengths = real.sum(1).tolist()
    _, state = prefill(span(inputs, 0, 50), mask, attention_mask=real)
    assert state.positions == lengths
    found, state = decode(state, inputs, 50)
    assert state.positions == [length + 40 for length in lengths]
    for row, length in enumerate(lengths):
        own = [t for t in range(50) if real[row, t]] + list(range(50, 90))
        alone = {name: x[row : row + 1, own] for name, x in inputs.items()}
        expected = smat.reference_attention(mask=mask, **alone)
        assert worst_row(found[row : row + 1], expected[:, length:]) <= 1e-12


@pytest.mark.parametrize("schedule", ["kept", "window", "doubling", "none"])
def test_packed_sequences_become_rows(schedule):
    mask = smat.SMatMask(97, 2, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 97, "gated", batch=1)
    edges = [0, 45, 45, 52, 97]
    _, state = prefill(inputs, mask, cu_seqlens=torch.tensor(edges))
    assert state.positions == [45, 0, 7, 45]
    more = make_case(mask, 30, "gated", batch=4, seed=5)
    found, _ = decode(state, more)
    for row, (start, stop) in enumerate(itertools.pairwise(edges)):
        alone = {
            name: torch.cat([x[:, start:stop], more[name][row : row + 1]], 1)
            for name, x in inputs.items()
        }
        expected = smat.reference_attention(mask=mask, **alone)
        assert worst_row(found[row : row + 1], expected[:, stop - start :]) <= 1e-12


def test_packed_sequences_under_a_fixed_mask_are_refused():
    mask = smat.SMatMask(97, 2, 8)
    inputs = make_case(mask, 97, batch=1)
    with pytest.raises(ValueError, match=r"T = 97, d = 2.*tables of its own size"):
        prefill(inputs, mask, cu_seqlens=torch.tensor([0, 40, 97]))


def test_past_its_horizon_a_fixed_mask_keeps_its_boundary_and_says_so_once():
    mask = smat.SMatMask(73, 2, 8)
    as_kept = smat.SMatMask(
        120, 2, 8, mask.geometry.field_size, boundary=smat.schedules.kept(mask.num_distant)
    )
    inputs = make_case(as_kept, 120)
    expected = smat.reference_attention(mask=as_kept, **inputs)
    first, state = decode(empty_for(mask, inputs), inputs, 0, 73)
    with pytest.warns(smat.SMatWarning, match=r"past T = 73.*n = 32") as caught:
        out, state = state.step(**at(inputs, 73))
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rest, state = decode(state, inputs, 74, 100)
        last, _ = state.extend(**span(inputs, 100, 120))
    found = torch.cat([first, out.unsqueeze(1), rest, last], 1)
    assert worst_row(found, expected) <= 1e-12
