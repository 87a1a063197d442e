"""Multi-key recall: the layout, the metric, and what the rule-chosen hyperplane can see."""

import itertools
import math

import pytest
import torch

from smat.geometry import Geometry
from smat.layers import CallInfo, HashedRouting
from smat.masks import SMatMask, TokenHash, agreeing_direction
from smat.tasks.multi_key_recall import MultiKeyRecall, coverage

CASES = [(1, 1024), (2, 1024), (3, 1024), (3, 128), (2, 64), (3, 200)]


def read(task, batch, example):
    """Answer an example by looking keys up one token at a time."""
    ids = batch.inputs["token_ids"][example].tolist()
    payload = batch.inputs["payload"][example]
    pair_of_key = {}
    for position, token in enumerate(ids):
        if token == task.marker:
            assert payload[position].sum() == 1
            pair_of_key[ids[position - 1]] = int(payload[position].argmax())
        else:
            assert not payload[position].any()
    answers = []
    for row in batch.rows[example].tolist():
        asked = {pair_of_key[key] for key in ids[row - task.num_keys + 1 : row + 1]}
        answers.append([float(pair in asked) for pair in range(task.num_pairs)])
    return pair_of_key, torch.tensor(answers)


@pytest.mark.parametrize(("num_keys", "seq_len"), CASES)
def test_looking_the_keys_up_gives_the_targets(num_keys, seq_len):
    task = MultiKeyRecall(num_keys, seq_len)
    batch = task.train_batch(3, 16, seed=1)
    for example in range(16):
        pair_of_key, answers = read(task, batch, example)
        assert sorted(pair_of_key.values()) == list(range(8))
        assert list(pair_of_key.values()) == list(range(8))  # numbered in order of position
        assert torch.equal(answers, batch.targets[example])
    assert (batch.targets.sum(-1) == num_keys).all()


@pytest.mark.parametrize(("num_keys", "seq_len"), CASES)
def test_layout(num_keys, seq_len):
    task = MultiKeyRecall(num_keys, seq_len)
    batch = task.train_batch(0, 64, seed=0)
    ids, rows = batch.inputs["token_ids"], batch.rows
    half = seq_len // 2
    is_key = (ids >= 1) & (ids <= 32)
    is_marker = ids == 33
    assert task.vocab_size == 290
    assert ids.min() >= 1
    assert ids.max() == 289
    assert torch.equal(is_key[:, : half - 1], is_marker[:, 1:half])
    assert is_key[:, :half].sum(-1).eq(8).all()
    places = is_key[:, :half].nonzero()[:, 1]
    assert places.remainder(2).eq(0).all()
    assert places.max() < half - 2
    # In the second half keys stand nowhere but on the answer rows and right before them.
    wanted = torch.zeros_like(is_key)
    for back in range(num_keys):
        wanted.scatter_(1, rows - back, True)
    assert torch.equal(is_key[:, half:], wanted[:, half:])
    assert not is_marker[:, half:].any()
    assert rows.min() - num_keys + 1 >= half
    assert rows.max() < seq_len
    if seq_len % 16 == 0:
        assert rows[0].tolist() == [half + seq_len // 16 * (m + 1) - 1 for m in range(8)]


def test_batches_are_functions_of_their_arguments():
    task = MultiKeyRecall(2, 128)
    first, again = task.train_batch(5, 8, 0), task.train_batch(5, 8, 0)
    for name in first.inputs:
        assert torch.equal(first.inputs[name], again.inputs[name])
    assert torch.equal(first.targets, again.targets)
    others = [task.train_batch(6, 8, 0), task.train_batch(5, 8, 1), *task.eval_batches(0)]
    for other in others:
        assert not torch.equal(first.inputs["token_ids"], other.inputs["token_ids"][:8])


def test_evaluation_has_2048_queries_and_splits_differ():
    task = MultiKeyRecall(3)
    test, validation = list(task.eval_batches(0)), list(task.eval_batches(0, "validation"))
    assert len(test) == 8
    assert sum(batch.rows.numel() for batch in test) == 2048
    seen = [batch.inputs["token_ids"][0] for batch in test + validation]
    assert not any(torch.equal(one, two) for one, two in itertools.combinations(seen, 2))


def test_the_metric_wants_every_requested_pair_and_no_other():
    task = MultiKeyRecall(2, 128)
    batch = task.train_batch(0, 4, 0)
    right = torch.where(batch.targets > 0, 0.51, 0.5)  # the threshold itself counts as absent
    assert task.score(right, batch).shape == (4, 8)
    assert task.score(right, batch).eq(1).all()
    missing, surplus = right.clone(), right.clone()
    missing[0, 0, batch.targets[0, 0].argmax()] = 0.5
    surplus[1, 3, batch.targets[1, 3].argmin()] = 0.6
    assert task.score(missing, batch).sum() == 31
    assert task.score(missing, batch)[0, 0] == 0
    assert task.score(surplus, batch)[1, 3] == 0
    assert task.loss(torch.where(batch.targets > 0, 50.0, -50.0), batch) < 1e-6


@pytest.mark.parametrize(("num_keys", "entropy", "guess"), [
    (1, 0.377, 12.5), (2, 0.562, 3.6), (3, 0.662, 1.8),
])  # fmt: skip
def test_a_constant_predictor_scores_nothing_at_the_loss_of_the_plateau(num_keys, entropy, guess):
    task = MultiKeyRecall(num_keys, 128)
    batch = task.train_batch(0, 64, 0)
    outputs = torch.full_like(batch.targets, math.log(num_keys / (8 - num_keys)))
    controls = task.controls()
    assert task.loss(outputs, batch).item() == pytest.approx(entropy, abs=5e-4)
    assert controls["loss of a constant predictor (nats)"] == pytest.approx(entropy, abs=5e-4)
    assert task.score(outputs, batch).sum() == controls["constant predictor"] == 0
    assert controls["random guess"] == pytest.approx(guess, abs=0.05)


@pytest.mark.parametrize("vc_dim", [2, 3, 4])
@pytest.mark.parametrize("num_keys", [1, 2, 3])
def test_hashed_routing_files_payloads_under_keys_and_reads_all_that_one_plane_holds(
    vc_dim, num_keys
):
    task = MultiKeyRecall(num_keys)
    batch = task.train_batch(0, 32, 0)
    ids = batch.inputs["token_ids"]
    mask = SMatMask(1024, vc_dim, chunk_size=256)
    call = CallInfo(*ids.shape, ids.device, extras={"token_ids": ids})
    routing = HashedRouting(task.vocab_size, num_heads=4, write_lag=1, num_keys=num_keys)
    assignment, _ = routing(torch.zeros(*ids.shape, 8), mask, call)
    cell = TokenHash(task.vocab_size, 4, mask.geometry).profile(ids)

    example, marker = (ids == task.marker).nonzero().T
    assert torch.equal(assignment.profile[example, marker], cell[example, marker - 1])
    profile_of_pair = assignment.profile[example, marker].view(32, 8, 4)

    incidence = mask.geometry.incidence()
    chosen = torch.stack([t[r] for t, r in zip(assignment.query_type, batch.rows, strict=True)])
    asked = batch.targets.bool()
    # (B, R, H, pairs): does the chosen hyperplane hold the pair, does any hold all k at once?
    sees = incidence[chosen[..., None], profile_of_pair.transpose(1, 2)[:, None]]
    sees_all = (sees | ~asked[:, :, None]).all(-1)
    cells = torch.stack([profile_of_pair[b].T[:, asked[b, r]] for b in range(32) for r in range(8)])
    possible = incidence[:, cells].all(-1).any(0).view(32, 8, 4)
    assert torch.equal(sees_all, possible)
    if num_keys <= vc_dim - 1:
        assert possible.all()
    else:
        assert 0 < possible.float().mean() < 0.5


def simulated(vc_dim, num_keys, num_tables=120):
    """Coverage by random tables: every choice of keys, table by table, in per cent."""
    geometry = Geometry.for_distant(512, vc_dim)
    keys = torch.tensor(list(itertools.combinations(range(32), num_keys)))
    shares = []
    for seed in range(num_tables):
        cells = TokenHash(32, 4, geometry, seed).profile(torch.arange(32)[None])[0].T[:, keys]
        shares.append(agreeing_direction(geometry, cells)[1].any(0).double().mean())
    return 100 * torch.stack(shares)


@pytest.mark.parametrize(
    ("vc_dim", "num_keys", "drawn_once"), [(2, 2, 17.1), (3, 3, 34.3), (2, 3, 0.7), (3, 2, 100)]
)
def test_predicted_coverage_is_that_of_random_tables(vc_dim, num_keys, drawn_once):
    shares = simulated(vc_dim, num_keys)
    error = shares.std() / len(shares) ** 0.5
    predicted = MultiKeyRecall(num_keys).controls()[f"some head covers all k, d={vc_dim}"]
    assert abs(predicted - shares.mean()) <= 4 * error
    # A single set of tables, 32 keys in four heads, strays from the mean; 0.05 is rounding.
    assert abs(drawn_once - shares.mean()) <= 2 * shares.std() + 0.05


@pytest.mark.parametrize(
    ("vc_dim", "num_keys"), list(itertools.product([1, 2, 3, 4], [1, 2, 3, 4]))
)
def test_coverage_counts_cells_that_no_hyperplane_holds(vc_dim, num_keys):
    geometry = Geometry(vc_dim, 2)
    cells = torch.cartesian_prod(*[torch.arange(geometry.num_profiles)] * num_keys)
    share = agreeing_direction(geometry, cells.view(-1, num_keys))[1].double().mean().item()
    assert coverage(geometry, num_keys, num_heads=1) == pytest.approx(share, abs=1e-12)
    assert coverage(geometry, num_keys, num_heads=3) == pytest.approx(1 - (1 - share) ** 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_keys": 0}, "0, 8 and 32"),
        ({"num_keys": 9}, "9, 8 and 32"),
        ({"num_keys": 1, "seq_len": 32}, "seq_len = 32 has 7 places"),
        ({"num_keys": 5, "seq_len": 64}, "leaves 4 tokens for each of 8 answers.*num_keys = 5"),
    ],
)
def test_a_task_that_does_not_fit_is_refused_with_its_numbers(fields, message):
    with pytest.raises(ValueError, match=message):
        MultiKeyRecall(**fields)


def test_it_describes_itself():
    text = MultiKeyRecall(2, 256).describe()
    assert "T = 256" in text
    assert "k = 2" in text
    assert "Chosen" in text
