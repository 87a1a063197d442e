"""The byte model of byte_model.py trained by Lightning: checkpoints, resuming, any accelerator.

    python examples/byte_model_lightning.py novel.txt --steps 1000

Stop it and start it again with the same command: it goes on from its last checkpoint in --out.
"""

from __future__ import annotations

import math

import lightning
import torch
from byte_model import ByteModel, arguments, draw, read_text
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset


class Windows(IterableDataset):
    """Batches of windows of a text, for ever; the seed of the process says which."""

    def __init__(self, text: Tensor, batch: int, length: int) -> None:
        self.text, self.batch, self.length = text, batch, length

    def __iter__(self):
        while True:
            yield draw(self.text, self.batch, self.length)


class LightningByteModel(lightning.LightningModule):
    """What Lightning must know beside the model: its loss and its optimiser."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = ByteModel(width)

    def training_step(self, windows: Tensor) -> Tensor:
        loss = self.model.loss(windows)
        self.log("bits_per_byte", loss / math.log(2), prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.1)


def main(words: list[str] | None = None) -> lightning.Trainer:
    chosen = arguments(words)
    lightning.seed_everything(0, verbose=False)
    loader = DataLoader(
        Windows(read_text(chosen.text), chosen.batch, chosen.length), batch_size=None
    )
    keeper = ModelCheckpoint(chosen.out, save_last=True, every_n_train_steps=100)
    trainer = lightning.Trainer(
        max_steps=chosen.steps, callbacks=[keeper], default_root_dir=chosen.out,
        gradient_clip_val=1.0, log_every_n_steps=50, logger=False, enable_model_summary=False,
    )  # fmt: skip
    learner, last = LightningByteModel(chosen.width), chosen.out / "last.ckpt"
    trainer.fit(learner, loader, ckpt_path=last if last.exists() else None, weights_only=True)
    trainer.save_checkpoint(last)
    print(learner.model.cpu().write(chosen.prompt.encode(), chosen.write).decode(errors="replace"))
    return trainer


if __name__ == "__main__":
    main()
