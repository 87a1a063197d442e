"""A stepped window for ever: no drift past the horizon, and the same little work every token."""

import pytest
import torch

import smat
from smat.ops.smat import fold
from tests.ops.smat import million_steps
from tests.ops.smat.comparison import make_inputs, mild_gates, relative_rms
from tests.ops.smat.decoding import at, decode, empty_for

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")


def dense_row(mask, inputs, t, log_decay=None):
    """Write one row of the attention out, from the definition of the stepped window."""
    step, geometry = mask.boundary.step, mask.geometry
    boundary = max(0, t // step - 1) * step
    key = torch.arange(t + 1)
    on_hyperplane = geometry.incidence()[(t + 1) % geometry.num_types, key % geometry.num_profiles]
    weight = torch.where(key < boundary, on_hyperplane.double(), 1.0)[:, None]
    if log_decay is not None:
        later = log_decay[0, : t + 1].flip(0).cumsum(0).flip(0) - log_decay[0, : t + 1]
        weight = weight * later.exp()
    phi, psi = (
        torch.nn.functional.elu(x) + 1 for x in (inputs["q"][0, t], inputs["k"][0, : t + 1])
    )
    score = torch.einsum("hr,jhr->jh", phi, psi) * weight
    out = torch.einsum("jh,jhv->hv", score, inputs["v"][0, : t + 1])
    return out / score.sum(0).unsqueeze(-1)


def check_far_past_the_horizon(num_steps, vc_dim, gated):
    horizon, step = 128, 32
    mask = smat.SMatMask(horizon, vc_dim, 8, boundary=smat.schedules.window(step))
    inputs = make_inputs(num_steps, batch=1, heads=2, key_dim=4, value_dim=3)
    gates = mild_gates((1, num_steps, 2), strength=2e-3) if gated else None
    given = inputs if gates is None else inputs | {"log_decay": gates}
    exact, _ = decode(empty_for(mask, inputs), given)
    single = {name: x.float() for name, x in given.items()}
    rounded, state = decode(empty_for(mask, single), single)
    generator = torch.Generator().manual_seed(1)
    sample = torch.randint(num_steps // 2, num_steps, (40,), generator=generator).tolist()
    for t in (*sample, num_steps - 1):
        expected = dense_row(mask, inputs, t, gates)
        assert relative_rms(exact[0, t], expected) <= 1e-10
        assert relative_rms(rounded[0, t], expected) <= 1e-4
    assert state.positions == [num_steps]
    return state


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("vc_dim", [2, 3])
def test_a_window_does_not_drift(vc_dim, gated):
    check_far_past_the_horizon(1000, vc_dim, gated)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("vc_dim", [2, 3, 4])
def test_a_window_does_not_drift_over_20000_steps(vc_dim, gated):
    check_far_past_the_horizon(20000, vc_dim, gated)


@pytest.mark.parametrize("num_steps", [10_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_errors_and_memory_do_not_grow_with_the_steps(num_steps):
    found = million_steps.run(num_steps, vc_dim=2, gated=False)
    assert found["steps"] == num_steps
    assert found["error"] < 1e-5
    first, last = found["peak_kb"]
    assert last < first + 16 * 1024


@pytest.mark.parametrize(("vc_dim", "field_size"), [(2, 31), (3, 11), (4, 5)])
def test_the_share_of_a_fold_is_the_same_for_every_token(vc_dim, field_size, monkeypatch):
    step = 128
    mask = smat.SMatMask(4 * step, vc_dim, 8, field_size, boundary=smat.schedules.window(step))
    inputs = make_inputs(4 * step, batch=1, heads=2, key_dim=16, value_dim=15, dtype=torch.float32)
    monkeypatch.setattr(fold, "SLAB_ELEMENTS", 1)
    state, folded = empty_for(mask, inputs), []
    monkeypatch.setattr(fold, "_fold_slab", lambda *given: folded.append(len(shares)))
    shares = []
    for t in range(4 * step):
        before = len(folded)
        _, state = state.step(**at(inputs, t), inplace=True, backend="torch")
        shares.append(len(folded) - before)
    slabs = fold.num_slabs(state)
    assert slabs == 2 * 16
    # Three folds, each over the tokens of the step before it: no token has more than one slab.
    assert sum(shares) == 3 * slabs
    assert max(shares) == 1


def test_a_state_that_arrives_in_the_middle_of_a_block_catches_up():
    mask = smat.SMatMask(256, 3, 8, boundary=smat.schedules.window(32))
    inputs = make_inputs(256, batch=1)
    whole, _ = smat.smat_attention(mask=mask, **inputs)
    start = {name: x[:, :90] for name, x in inputs.items()}
    _, state = smat.smat_attention(mask=mask, **start, output_final_state=True)
    assert state.built == [0]
    for t in range(90, 96):
        out, state = state.step(**at(inputs, t), inplace=True)
    assert state.built == [fold.num_slabs(state)]
    out, state = state.step(**at(inputs, 96), inplace=True)
    assert state.built == [1]  # of the next fold
    assert relative_rms(out, whole[:, 96]) <= 1e-12


def test_several_tokens_do_the_shares_of_all_of_them():
    mask = smat.SMatMask(256, 3, 8, boundary=smat.schedules.window(64))
    inputs = make_inputs(256, batch=1)
    state = empty_for(mask, inputs)
    for start in range(0, 192, 24):
        part = {name: x[:, start : start + 24] for name, x in inputs.items()}
        _, state = state.extend(**part, inplace=True)
    assert state.positions == [192]
    assert state.built == [fold.num_slabs(state)]
