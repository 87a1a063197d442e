"""What a state holds: its bytes, copies that share nothing, and rows in any order."""

import pytest
import torch

import smat
from tests.ops.smat.decoding import (
    SCHEDULES,
    at,
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


def cache_megabytes(num_states, batch=64, feature_dim=32, aug_dim=33):
    """Count the cache of the paper's table: batch 64, one head, fp32."""
    return num_states * batch * feature_dim * aug_dim * 4 / 1e6


def test_the_cache_of_a_real_state_is_the_papers():
    mask = smat.SMatMask(262144, 2)
    length = mask.num_distant + 1
    k, v = torch.rand(1, length, 1, 32), torch.rand(1, length, 1, 32)
    state = smat.SMatState.after(k, v, mask).repeat_interleave(64)
    assert state.num_bytes / 1e6 == cache_megabytes(mask.geometry.num_types + 1)
    assert round(state.num_bytes / 1e6) == 99
    assert set(state.tensors) == {"recent", "type_table"}


@pytest.mark.parametrize(("vc_dim", "megabytes"), [(2, 99), (3, 774), (4, 3439)])
def test_the_cache_column_of_the_paper(vc_dim, megabytes):
    mask = smat.SMatMask(262144, vc_dim)
    # 3438.54 for d = 4: the paper rounds up.
    assert abs(cache_megabytes(mask.geometry.num_types + 1) - megabytes) < 0.5


@pytest.mark.parametrize("vc_dim", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bytes_follow_from_the_numbers_of_states(vc_dim, schedule):
    mask = smat.SMatMask(97, vc_dim, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 97, "gated")
    profiles, types = mask.geometry.num_profiles, mask.geometry.num_types
    for option, buffers in (("spread", 2), ("at_once", 1)):
        early = empty_for(mask, inputs, fold=option)
        _, late = decode(empty_for(mask, inputs, fold=option), inputs)
        if vc_dim == 1 or schedule == "none":
            expected = (1, 1)
        elif mask.boundary.moves:
            expected = (2 + 2 * profiles + buffers * types,) * 2
        else:
            expected = (1 + profiles, 1 + types)
        one_state = 2 * 2 * 4 * (3 + 1) * 8  # batch, heads, r, p, fp64
        assert (early.num_bytes, late.num_bytes) == tuple(count * one_state for count in expected)
        assert late.num_bytes <= sum(late.bytes_by_table().values())


def test_gates_cost_a_few_scalars():
    mask = smat.SMatMask(97, 3, 8)
    cases = [make_case(mask, 97, kind) for kind in ("gated", "plain")]
    gated, plain = (decode(empty_for(mask, case), case)[1] for case in cases)
    extra = set(gated.tensors) - set(plain.tensors)
    assert extra == {"log_decay", "edge_log_decay"}
    assert all(gated.tensors[name].numel() == 2 * 2 * 2 for name in extra)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_functional_step_leaves_the_old_state_as_it_was(schedule):
    mask = smat.SMatMask(97, 2, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 97, "gated and routed")
    expected, _ = decode(empty_for(mask, inputs), inputs)
    state, outs = empty_for(mask, inputs), []
    for t in range(97):
        old, before = state, snapshot(state)
        out, state = old.step(**at(inputs, t))
        assert unchanged(old, before)
        outs.append(out)
    assert torch.equal(torch.stack(outs, 1), expected)


@pytest.mark.parametrize("schedule", ["rebuilt", "window", "doubling"])
def test_states_that_share_memory_do_not_see_each_other_write(schedule):
    mask = smat.SMatMask(97, 2, 8, boundary=SCHEDULES[schedule])
    inputs, others = (make_case(mask, 97, "gated", seed=seed) for seed in (0, 5))
    expected, _ = decode(empty_for(mask, inputs), inputs)
    for split in (15, 31, 47, 48, 63, 64):
        _, state = decode(empty_for(mask, inputs), inputs, 0, split)
        _, after = state.step(**at(inputs, split))
        decode(state, others, split, 97)  # in place, in the memory that both came from
        found, _ = decode(after, inputs, split + 1)
        assert torch.equal(found, expected[:, split + 1 :])


def test_clones_and_moves_share_nothing():
    mask = smat.SMatMask(97, 3, 8, boundary=smat.schedules.window(16))
    inputs = make_case(mask, 97, "gated")
    _, state = decode(empty_for(mask, inputs), inputs, 0, 60)
    copies = [state.clone(), state.to(dtype=torch.float64), state.to("cpu"), state.select([0, 1])]
    before = snapshot(state)
    outs = [decode(copy, inputs, 60)[0] for copy in copies]
    assert unchanged(state, before)
    expected, _ = decode(state, inputs, 60)
    assert all(torch.equal(out, expected) for out in outs)


def test_states_change_their_dtype():
    mask = smat.SMatMask(97, 3, 8)
    inputs = make_case(mask, 97, "gated")
    whole = smat.reference_attention(mask=mask, **inputs)
    _, state = prefill(span(inputs, 0, 70), mask)
    single = state.to(dtype=torch.float32)
    assert single.num_bytes == state.num_bytes // 2
    assert single.tensors["log_decay"].dtype == torch.float64
    found, _ = decode(single, inputs, 70)
    assert worst_row(found, whole[:, 70:]) <= 1e-5
    with pytest.raises(ValueError, match=r"float32 or float64, got torch.float16"):
        state.to(dtype=torch.float16)


@pytest.mark.parametrize("schedule", ["rebuilt", "kept", "window", "doubling"])
def test_beams_are_repeated_and_reordered(schedule):
    mask = smat.SMatMask(97, 3, 8, boundary=SCHEDULES[schedule])
    prompts = make_case(mask, 97, "gated and routed", batch=2)
    _, state = prefill(span(prompts, 0, 30), mask)
    beams = state.repeat_interleave(3)
    assert (len(beams), beams.positions) == (6, [30] * 6)
    tokens = make_case(mask, 60, "gated and routed", batch=6, seed=3)
    history = [{name: x[row // 3, :30] for name, x in prompts.items()} for row in range(6)]
    generator = torch.Generator().manual_seed(0)
    for t in range(60):
        history = [
            {name: torch.cat([x, tokens[name][row, t : t + 1]]) for name, x in past.items()}
            for row, past in enumerate(history)
        ]
        out, beams = beams.step(**at(tokens, t), inplace=True)
        if t % 7 == 0:
            order = torch.randint(6, (6,), generator=generator)
            beams, out = beams.select(order), out[order]
            history = [history[row] for row in order.tolist()]
    whole = {name: torch.stack([past[name] for past in history]) for name in history[0]}
    expected = smat.reference_attention(mask=mask, **whole)
    assert worst_row(out.unsqueeze(1), expected[:, -1:]) <= 1e-12


@pytest.mark.parametrize("schedule", ["kept", "window", "doubling"])
def test_rows_of_different_lengths_are_selected_with_their_positions(schedule):
    mask = smat.SMatMask(97, 3, 8, boundary=SCHEDULES[schedule])
    inputs = make_case(mask, 97, "gated", batch=3)
    real = torch.arange(60) < torch.tensor([[60], [35], [12]])
    _, state = prefill(span(inputs, 0, 60), mask, attention_mask=real)
    _, state = decode(state, inputs, 60, 65)
    assert state.select(slice(1, None)).positions == [40, 17]
    assert state.select([2, 0, 2]).positions == [17, 65, 17]
    expected, _ = decode(state.clone(), inputs, 65)
    order = [2, 0, 2, 1]
    chosen = {name: x[order] for name, x in inputs.items()}
    found, _ = decode(state.select(torch.tensor(order)), chosen, 65)
    assert worst_row(found, expected[order]) <= 1e-14
    with pytest.raises(ValueError, match=r"rows must lie in \[0, 3\), got \[3\]"):
        state.select([3])
    with pytest.raises(ValueError, match="1 or more, got 0"):
        state.repeat_interleave(0)


def test_a_state_says_what_it_is():
    mask = smat.SMatMask(97, 2, 8)
    inputs = make_case(mask, 20)
    _, state = prefill(inputs, mask)
    assert "d = 2" in repr(state)
    assert "positions = [20]" in repr(state)
