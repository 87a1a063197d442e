"""A byte model made of a configuration, trained by transformers' Trainer, writing by generate().

    python examples/byte_model_transformers.py novel.txt --steps 1000

Stop it and start it again with the same command: it goes on from its last checkpoint in --out.
What it saves there loads with `AutoModelForCausalLM.from_pretrained` wherever smat.models.hf is
imported.
"""

from __future__ import annotations

import torch
from byte_model import arguments, read_text
from torch import Tensor
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from smat.models.hf import SMatConfig, SMatForCausalLM


class Excerpts(Dataset):
    """A text cut into excerpts of one length."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.rows = text[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.rows[index].long()
        return {"input_ids": ids, "labels": ids}  # the model shifts labels itself


def make_model(width: int, length: int) -> SMatForCausalLM:
    """Return linear attention under a stepped window in turn with Mamba-2 and its memory."""
    mamba2 = {"mixer": "mamba2_smat", "vc_dim": 2, "head_dim": width // 4, "state_dim": 16}
    smat = {"mixer": "smat", "vc_dim": 2, "num_heads": 4}
    config = SMatConfig(
        vocab_size=256, hidden_size=width, num_hidden_layers=2, mixers=[smat, mamba2],
        context_length=length, mlp_ratio=4.0,
    )  # fmt: skip
    return SMatForCausalLM(config)


def main(words: list[str] | None = None) -> Trainer:
    chosen = arguments(words)
    set_seed(0)
    model = make_model(chosen.width, chosen.length)
    trainer = Trainer(
        model,
        TrainingArguments(
            str(chosen.out), max_steps=chosen.steps, per_device_train_batch_size=chosen.batch,
            learning_rate=4e-3, weight_decay=0.1, warmup_steps=chosen.steps // 10, save_steps=100,
            save_total_limit=1, logging_steps=50, report_to=[], dataloader_pin_memory=False,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Excerpts(read_text(chosen.text), chosen.length),
    )  # fmt: skip
    last = get_last_checkpoint(str(chosen.out)) if chosen.out.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    prompt = torch.tensor([list(chosen.prompt.encode())], device=model.device)
    written = model.eval().generate(
        prompt, max_new_tokens=chosen.write, do_sample=True, temperature=0.7
    )
    print(bytes(written[0].tolist()).decode(errors="replace"))
    return trainer


if __name__ == "__main__":
    main()
