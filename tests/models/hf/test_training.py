"""Losses, checkpointing of activations, precision, and the trainers of two libraries."""

import pytest
import torch
import torch.nn.functional as F

from smat.layers import sum_balance_losses
from tests.models.hf.language import MIXERS, VOCAB, make_model, make_prompt

pytestmark = pytest.mark.filterwarnings("ignore::smat.SMatWarning")
four_mixers = pytest.mark.parametrize("name", MIXERS)


def gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss, {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}


@four_mixers
def test_the_loss_is_the_mean_over_labels_that_count(name):
    model, prompt = make_model(name), make_prompt(length=12)
    labels = prompt["input_ids"].masked_fill(prompt["attention_mask"] == 0, -100)
    out = model(**prompt, labels=labels)
    assert out.logits is None
    whole = model(**prompt, labels=labels, logits_to_keep=0)
    expected = F.cross_entropy(whole.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(whole.loss, expected)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    torch.testing.assert_close(model(**prompt, shift_labels=shifted).loss, expected)
    halves = [
        model(prompt["input_ids"][i : i + 1], prompt["attention_mask"][i : i + 1],
              labels=labels[i : i + 1], num_items_in_batch=torch.tensor(19)).loss
        for i in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(sum(halves), expected)  # 8 + 11 labels


def test_the_balance_of_a_memory_counts_in_training_alone():
    model, prompt = make_model("mamba2_smat", balance_weight=0.5), make_prompt(length=16)
    given = {**prompt, "labels": prompt["input_ids"]}
    plain = model(**given)
    assert plain.balance_loss is None
    out = model.train()(**given)
    torch.testing.assert_close(out.balance_loss, sum_balance_losses(model))
    assert out.balance_loss > 0
    torch.testing.assert_close(out.loss, plain.loss + 0.5 * out.balance_loss)


@four_mixers
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_give_the_same_gradients(name, reentrant):
    model, prompt = make_model(name, balance_weight=0.5).train(), make_prompt(length=16)
    given = {**prompt, "labels": prompt["input_ids"]}
    loss, expected = gradients(model, **given)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.is_gradient_checkpointing
    again, found = gradients(model, **given)
    torch.testing.assert_close(again, loss)
    assert found.keys() == expected.keys()
    for key, x in expected.items():
        torch.testing.assert_close(found[key], x, msg=key)


@four_mixers
def test_packed_sequences_are_told_apart(name):
    model = make_model(name)
    ids = make_prompt(batch=1, length=14, padded=0)["input_ids"]
    with torch.no_grad():
        packed = model(ids, cu_seqlens=torch.tensor([0, 9, 14]), use_cache=False).logits
        torch.testing.assert_close(packed[:, 9:], model(ids[:, 9:]).logits)


@four_mixers
def test_bfloat16_trains_and_decodes(name):
    model, prompt = make_model(name, dtype=torch.bfloat16), make_prompt(length=12)
    loss, found = gradients(model.train(), **prompt, labels=prompt["input_ids"])
    assert loss.isfinite()
    assert all(x.dtype == torch.bfloat16 and bool(x.isfinite().all()) for x in found.values())
    assert model.eval().generate(**prompt, max_new_tokens=3, pad_token_id=0).shape == (2, 15)


class Repeats(torch.utils.data.Dataset):
    """Sequences that say the same 6 tokens twice."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        first = torch.randint(VOCAB, (6,), generator=torch.Generator().manual_seed(index))
        ids = torch.cat([first, first])
        return {"input_ids": ids, "labels": ids}


def same_weights(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


@four_mixers
def test_the_trainer_of_transformers_trains_and_resumes(name, tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    def train(folder, steps, resume=None):
        arguments = TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=steps, save_steps=3, report_to=[],
            per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=1e-2,
            lr_scheduler_type="constant", use_cpu=True, disable_tqdm=True, eval_steps=4,
            eval_strategy="steps", logging_steps=1, dataloader_pin_memory=False, seed=5,
        )  # fmt: skip
        model = make_model(name, dtype=torch.float32)
        trainer = Trainer(model, arguments, train_dataset=Repeats(), eval_dataset=Repeats())
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = train("whole", 8)
    losses = [each["eval_loss"] for each in whole.state.log_history if "eval_loss" in each]
    assert losses[-1] < losses[0]
    train("first", 3)
    resumed = train("first", 8, resume=str(tmp_path / "first" / "checkpoint-3"))
    assert same_weights(whole.model, resumed.model)


@four_mixers
@pytest.mark.filterwarnings("ignore")  # lightning's own, about workers and loggers
def test_lightning_trains_and_resumes(name, tmp_path):
    import lightning

    class Wrapped(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model(name, dtype=torch.float32)
            self.losses = []

        def training_step(self, batch, index):
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train(epochs, resume=None):
        trainer = lightning.Trainer(
            max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        wrapped = Wrapped()
        loader = torch.utils.data.DataLoader(Repeats(), batch_size=4)
        trainer.fit(wrapped.train(), loader, ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        return wrapped

    whole = train(3)
    assert whole.losses[-1] < whole.losses[0]
    train(1)
    assert same_weights(train(3, resume=tmp_path / "1.ckpt"), whole)
