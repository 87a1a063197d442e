"""Subset routing: landmarks, rows, the metric and what is certified about it."""

import pytest
import torch

from smat.tasks import SubsetRouting

# Traces that rows realise on k = 1..6 landmarks at T = 1024, by d.
REALISED = {
    1: (2, 3, 4, 5, 6, 7),
    2: (2, 4, 7, 10, 13, 16),
    3: (2, 4, 8, 15, 24, 35),
    4: (2, 4, 8, 16, 31, 54),
}
METRIC_CEILING = (100, 99.35, 98.65, 97.89, 97.17, 96.31)


@pytest.mark.parametrize("vc_dim", REALISED)
@pytest.mark.parametrize("k", range(1, 7))
def test_traces_and_ceilings(vc_dim, k):
    task = SubsetRouting(num_landmarks=k, vc_dim=vc_dim)
    assert len(task.landmarks.unique()) == k
    assert task.num_realised == len(task.mask.dense()[:, task.landmarks].unique(dim=0))
    assert task.num_realised == REALISED[vc_dim][k - 1]
    controls = task.controls()
    metric = controls["expected ceiling of the metric"]
    assert metric == pytest.approx(METRIC_CEILING[k - 1], abs=0.1)
    expected = METRIC_CEILING[k - 1] * task.num_realised / 2**k
    assert controls["expected ceiling"] == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("vc_dim", REALISED)
def test_a_row_has_the_nearest_trace_and_is_the_first_that_has_it(vc_dim):
    task = SubsetRouting(num_landmarks=5, vc_dim=vc_dim)
    traces = task.mask.dense()[:, task.landmarks]
    requests = (torch.arange(32)[:, None] >> torch.arange(5)) & 1 == 1
    distance = (traces[None] != requests[:, None]).sum(-1)  # (request, row)
    chosen = traces[task.rows]
    assert torch.equal((chosen != requests).sum(-1), distance.min(1).values)
    earlier = torch.arange(len(traces)) < task.rows[:, None]
    same = (traces[None] == chosen[:, None]).all(-1)
    assert not (earlier & same).any()
    assert int((distance.min(1).values == 0).sum()) == task.num_realised


def test_examples_are_functions_of_step_and_seed():
    task = SubsetRouting(num_landmarks=4, vc_dim=3)
    first, again, other = (task.train_batch(step, 16, 0) for step in (5, 5, 6))
    for name, x in first.inputs.items():
        assert torch.equal(x, again.inputs[name])
        assert not torch.equal(x, other.inputs[name])
    requests = torch.cat([task.train_batch(i, 64, 0).inputs["request"] for i in range(50)])
    counts = requests.bincount(minlength=16).float()
    assert ((counts - 200).abs() < 5 * 200**0.5).all()
    amounts = torch.cat([task.train_batch(i, 64, 0).inputs["payload"] for i in range(50)])
    assert amounts.mean().abs() < 0.05
    assert (amounts.std() - 1).abs() < 0.05


def test_targets_are_the_requested_payloads():
    task = SubsetRouting(num_landmarks=3, vc_dim=2)
    batch = task.train_batch(0, 32, 1)
    wanted = (batch.inputs["request"][:, None] >> torch.arange(3)) & 1
    assert torch.equal(batch.targets[:, 0], batch.inputs["payload"] * wanted)
    assert torch.equal(batch.rows[:, 0], task.rows[batch.inputs["request"]])


def test_score_is_the_exact_set_of_channels_above_one_percent():
    task = SubsetRouting(num_landmarks=2, vc_dim=1)
    batch = task.train_batch(0, 256, 0)
    assert task.loss(batch.targets, batch) == 0
    largest = batch.inputs["payload"].abs().amax(-1)
    right = task.score(batch.targets, batch)
    small = (batch.targets[:, 0].abs() < 0.01 * largest[:, None]) & (batch.targets[:, 0] != 0)
    assert torch.equal(right == 0, small.any(-1))
    noisy = batch.targets + 0.02 * largest[:, None, None]  # every channel is on
    all_asked = batch.inputs["request"] == 3
    assert torch.equal(task.score(noisy, batch) == 1, all_asked)


def test_the_answer_that_ignores_unseen_landmarks_reaches_the_ceiling():
    """Returning what a row's trace holds is right exactly where the trace is the request."""
    task = SubsetRouting(num_landmarks=5, vc_dim=3)
    (batch,) = task.eval_batches(seed=0)
    traces = task.mask.dense()[task.rows[batch.inputs["request"]]][:, task.landmarks]
    outputs = (batch.inputs["payload"] * traces)[:, None]
    reached = 100 * task.score(outputs, batch).mean()
    assert float(reached) == pytest.approx(task.controls()["expected ceiling"], abs=2.5)


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="got 0"):
        SubsetRouting(num_landmarks=0, vc_dim=2)
