"""One skeleton, injected mixers: only wanted rows, every parameter learning, clear refusals."""

from dataclasses import replace

import pytest
import torch

from smat.experiments.tables.mqar import RECIPE, recall_arms
from smat.experiments.tables.multi_key_recall import PRESETS, arms
from smat.models import ModelConfig, build_model
from smat.tasks import MQAR, LengthRecall, MultiKeyRecall

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
RECALL = MQAR(
    32, train_loads=((16, 2, 100), (64, 4, 100)), eval_loads=((16, 2), (64, 4)), num_eval=8
)
KEYS = MultiKeyRecall(num_keys=2, seq_len=64, num_pairs=4, num_answers=4)
KEY_ARMS = arms(replace(PRESETS["quick"], width=32), KEYS)
RECALL_ARMS = recall_arms(RECALL, 32, RECIPE)


def build(config, task):
    torch.manual_seed(0)
    return build_model(config, task).double()


def doubles(batch):
    return {name: x.double() if x.is_floating_point() else x for name, x in batch.inputs.items()}


@pytest.mark.parametrize("arm", KEY_ARMS)
def test_rows_alone_equal_rows_of_the_whole(arm):
    model = build(KEY_ARMS[arm].model, KEYS)
    batch = KEYS.train_batch(step=0, batch_size=2, seed=0)
    inputs = doubles(batch)
    some, whole = model(rows=batch.rows, **inputs), model(**inputs)
    expected = whole.gather(1, batch.rows[..., None].expand(-1, -1, whole.shape[-1]))
    torch.testing.assert_close(some, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("arm", RECALL_ARMS)
@pytest.mark.parametrize("step", [0, 1])  # one batch of each length
def test_recall_models_learn_at_every_length(arm, step):
    model = build(RECALL_ARMS[arm].model, RECALL)
    batch = RECALL.train_batch(step, 100, seed=0)
    out = model(rows=batch.rows, **batch.inputs)
    assert out.shape == (*batch.rows.shape, 32)
    loss = RECALL.loss(out, batch)
    balance = model.balance_loss()
    assert (balance is not None) == ("smat" in arm)
    (loss if balance is None else loss + balance.double()).backward()
    learned = [p.grad is not None for p in model.parameters()]
    # With a memory only the hash and the scorer of the batch's field size take part.
    assert all(learned) if "smat" not in arm else sum(learned) > 0.5 * len(learned)


def test_answers_in_the_first_half_ignore_what_follows():
    model = build(RECALL_ARMS["mamba2_smat_d2"].model, RECALL)
    ids = RECALL.train_batch(1, 4, 0).inputs["token_ids"]
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 32
    before, after = model(token_ids=ids), model(token_ids=changed)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("name", ["none", "kept", "rebuilt", "doubling", "window_8", "window_4"])
def test_boundary_schedules_take_longer_inputs_than_they_were_made_for(name):
    task = LengthRecall(64, 4, (64, 128), 128, (0, 16), 16, 16, 16, 16, num_eval=2)
    options = {"num_heads": 2, "vc_dim": 2, "decay_gate": True, "boundary": name}
    model = build(ModelConfig("smat_schedule", 16, options=options), task)
    for batch in task.eval_batches(seed=0):
        assert model(rows=batch.rows, **batch.inputs).isfinite().all()


def test_unknown_mixers_and_norms_are_refused():
    with pytest.raises(ValueError, match="one of softmax"):
        build_model(ModelConfig("transformer", 16), KEYS)
    with pytest.raises(ValueError, match="'batch'"):
        build_model(ModelConfig("mamba2", 64, norm="batch"), KEYS)
    with pytest.raises(ValueError, match="as many tokens as outputs"):
        build_model(ModelConfig("deltanet", 16, tied=True, options={"num_heads": 1}), KEYS)
