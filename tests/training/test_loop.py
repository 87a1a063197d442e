"""Training follows its recipe, tells what it does, and resumes as if nothing had happened."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from tiny import Parity, TinyConfig, changed
from torch import nn

from smat.training import (
    CheckpointError,
    Interrupted,
    NonFiniteLossError,
    TrainingConfig,
    load_weights,
    train,
)
from smat.training.checkpoint import load_checkpoint
from smat.training.fabric import make_fabric
from smat.training.trainer import LOOK_EVERY, Trainer

CONFIG = TrainingConfig(
    steps=40, batch_size=8, learning_rate=1e-2, optimizer="adamw", weight_decay=0.1,
    schedule="cosine", warmup_steps=4, eval_every=15, balance_weight=0.1, balance_anneal=30,
    checkpoint_seconds=1000.0,
)  # fmt: skip
TASK = Parity()


def model(seed=0, **changes):
    torch.manual_seed(seed)
    return TinyConfig(**changes).build(TASK)


def fit(folder, config=CONFIG, task=TASK, net=None, **options):
    return train(net or model(), task, config, folder, seed=3, device="cpu", **options)


def stop_after(steps):
    calls = []
    return lambda: calls.append(1) or len(calls) >= steps


def test_it_learns_and_returns_what_a_record_needs(tmp_path):
    result = fit(tmp_path, changed(CONFIG, steps=300))
    assert set(result) == {
        "accuracy", "by_cell", "loss", "curve", "parameters", "minutes", "steps_per_second",
        "tokens_per_second",
    }  # fmt: skip
    assert result["accuracy"] > 90
    assert set(result["by_cell"]) == {"index=0", "index=1"}
    assert result["accuracy"] == pytest.approx(sum(result["by_cell"].values()) / 2)
    assert result["parameters"] == sum(p.numel() for p in model().parameters())
    assert result["curve"][-1][0] == 300
    assert result["curve"][-1][2] == result["accuracy"]
    assert result["minutes"] * 60 * result["steps_per_second"] == pytest.approx(300)


def test_a_task_may_be_scored_on_several_splits(tmp_path, monkeypatch):
    test = fit(tmp_path / "test")
    monkeypatch.setattr(Parity, "scored_splits", ("validation", "test"))
    both = fit(tmp_path / "both")
    assert both["by_cell"]["test"] == test["accuracy"]
    assert both["loss"] != test["loss"]  # of the first split; accuracies may agree by chance
    assert both["accuracy"] == pytest.approx(
        (both["by_cell"]["index=0"] + both["by_cell"]["index=1"]) / 2
    )


def test_the_curve_has_every_evaluation_and_the_mean_loss_between_points(tmp_path):
    net, told = model(), []
    result = fit(tmp_path, net=net, on_progress=told.append)
    assert [point[0] for point in result["curve"]] == list(range(1, 41))
    assert [step for step, _, score in result["curve"] if score is not None] == [15, 30, 40]
    assert told[0].step == 0
    assert all(a.step <= b.step for a, b in pairwise(told))


@pytest.mark.parametrize("stops", [(1,), (17,), (15, 10, 5)])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path, stops):
    whole = fit(tmp_path / "whole")
    for seed, number in enumerate(stops):  # only the first part begins with its own weights
        with pytest.raises(Interrupted):
            fit(tmp_path / "parts", net=model(seed), should_stop=stop_after(number))
    torch.manual_seed(99)
    parts = fit(tmp_path / "parts", net=model(seed=98))
    for name in ("accuracy", "by_cell", "loss", "curve"):
        assert parts[name] == whole[name], name
    one, other = load_weights(tmp_path / "whole"), load_weights(tmp_path / "parts")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_dropout_that_makes_the_test_above_strict_is_really_drawn(tmp_path):
    fit(tmp_path / "with")
    fit(tmp_path / "without", net=model(dropout=0.0))
    one, other = load_weights(tmp_path / "with"), load_weights(tmp_path / "without")
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_a_run_killed_after_its_last_step_only_evaluates(tmp_path):
    whole = fit(tmp_path)
    again = fit(tmp_path, task=replace(TASK, nan_at=0), net=model(seed=5))  # any step would fail
    assert again == whole


def test_time_spent_before_an_interruption_counts(tmp_path):
    slow = replace(TASK, step_seconds=0.02)
    with pytest.raises(Interrupted):
        fit(tmp_path, task=slow, should_stop=stop_after(30))
    before = load_checkpoint(tmp_path)[0]["seconds"]
    assert before > 30 * 0.02
    result = fit(tmp_path)
    assert result["minutes"] * 60 > before
    tokens = 40 * 8 * TASK.length  # those before the interruption too
    assert result["tokens_per_second"] * result["minutes"] * 60 == pytest.approx(tokens)


def test_checkpoints_come_by_the_clock(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(Trainer, "save", lambda self, folder: saved.append(self.step))
    fit(tmp_path)
    assert saved == [40]
    saved.clear()
    fit(tmp_path, changed(CONFIG, checkpoint_seconds=0.0))
    assert saved == list(range(1, 41))


def test_a_loss_that_is_no_number_stops_the_run_and_says_where(tmp_path):
    with pytest.raises(NonFiniteLossError) as raised:
        fit(tmp_path, task=replace(TASK, nan_at=20))
    message = str(raised.value)
    rate = 1e-2 * (0.1 + 0.9 * (1 + math.cos(math.pi * 16 / 35)) / 2)
    assert f"the loss is nan at step 20 (learning rate {rate:.3g})" in message
    assert "the largest gradient of the last step was" in message
    names = [name for name, _ in model().named_parameters()]
    assert any(f"in {name};" in message for name in names)
    assert "\n" not in message
    assert load_checkpoint(tmp_path) == (None, None)


def test_a_loss_that_is_no_number_at_the_first_step_has_no_gradient_to_blame(tmp_path):
    with pytest.raises(NonFiniteLossError, match=r"at step 0 .* before any gradient"):
        fit(tmp_path, task=replace(TASK, nan_at=0))


def test_where_looking_is_dear_the_step_is_still_named(tmp_path, monkeypatch):
    real = Trainer.__init__

    def like_a_gpu(self, *arguments):
        real(self, *arguments)
        self.look_every = LOOK_EVERY

    monkeypatch.setattr(Trainer, "__init__", like_a_gpu)
    config = changed(CONFIG, eval_every=0, steps=2000)  # a point of the curve every 20 steps
    with pytest.raises(NonFiniteLossError, match="at step 27 "):
        fit(tmp_path, config, task=replace(TASK, nan_at=27))


def test_the_largest_gradient_is_the_one_before_clipping(tmp_path):
    trainer = Trainer(make_fabric("cpu"), model(), replace(TASK, nan_at=3), CONFIG, seed=3)
    for _ in range(3):
        trainer.train_step()
    clipped = max(
        p.grad.abs().max().item() for p in trainer.model.parameters() if p.grad is not None
    )
    scale = max(1.0, trainer.gradient_norm.item() / CONFIG.clip)
    with pytest.raises(NonFiniteLossError, match=f"was {clipped * scale:.3g}, in"):
        trainer.train_step()


def test_gradients_are_clipped_to_the_norm(tmp_path):
    config = changed(CONFIG, clip=1e-3)
    trainer = Trainer(make_fabric("cpu"), model(), TASK, config, seed=3)
    trainer.train_step()
    gradients = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    assert norm.item() == pytest.approx(1e-3, rel=1e-3)
    assert trainer.gradient_norm.item() > 1e-2


@pytest.mark.parametrize(("step", "weight"), [(0, 0.1), (15, 0.05), (30, 0.0)])
def test_the_balance_loss_is_annealed(step, weight):
    trainer = Trainer(make_fabric("cpu"), model(), TASK, CONFIG, seed=3)
    trainer.step = step
    trainer.model.spread = torch.tensor(2.0)
    assert trainer.with_balance(torch.tensor(1.0)).item() == pytest.approx(1 + 2 * weight)


@pytest.mark.parametrize("kind", ["none", "absent"])
def test_a_model_without_balance_loss_trains_all_the_same(tmp_path, kind):
    class Silent(type(model())):
        balance_loss = (lambda self: None) if kind == "none" else None

    net = Silent(16, 0.1, TASK)
    assert fit(tmp_path, net=net)["curve"][-1][0] == 40


def test_a_folder_of_another_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(Interrupted):
        fit(tmp_path, should_stop=stop_after(3))
    with pytest.raises(CheckpointError, match="is of another model") as raised:
        fit(tmp_path, net=model(width=8))
    assert "\n" not in str(raised.value)


def test_a_model_in_evaluation_mode_is_trained_in_training_mode(tmp_path):
    net = model().eval()
    fit(tmp_path, net=net)
    assert net.training


def test_only_rows_and_inputs_reach_the_model(tmp_path):
    seen = []

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model()

        def forward(self, **inputs):
            seen.append(set(inputs))
            return self.inner(**inputs)

    fit(tmp_path, changed(CONFIG, steps=4, balance_weight=0.0), net=Watching())
    assert all(names == {"rows", "token_ids", "scale"} for names in seen)
