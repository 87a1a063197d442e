"""One skeleton for every experiment: embed, mix, and read out only the rows that count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from smat.layers import sum_balance_losses
from smat.models.block import Block, make_norm
from smat.models.mixers import Option, SequenceTask, make_mixer
from smat.models.token_losses import token_losses


@dataclass(frozen=True)
class ModelConfig:
    """A sequence model, see `SequenceModel`; `options` are those of `smat.models.mixers`."""

    mixer: str
    width: int
    num_layers: int = 1
    options: Mapping[str, Option] = field(default_factory=dict)
    learned_positions: bool = False
    position_std: float = 0.02  # of the positions at the start
    mlp_ratio: float = 0.0
    norm: str = "rms"
    tied: bool = False

    def build(self, task: SequenceTask) -> SequenceModel:
        """Return the model for a task, with freshly drawn weights."""
        return SequenceModel(self, task)


class SequenceModel(nn.Module):
    """Embeddings, a stack of mixers, and a read-out.

    >>> from smat.tasks import MultiKeyRecall
    >>> task = MultiKeyRecall(num_keys=1, seq_len=128)
    >>> model = SequenceModel(ModelConfig("mamba2", width=32, options={"head_dim": 16}), task)
    >>> batch = task.train_batch(step=0, batch_size=2, seed=0)
    >>> model(rows=batch.rows, **batch.inputs).shape
    torch.Size([2, 8, 8])

    Tokens, payloads and learned positions (where the task and the configuration have them) are
    embedded and added up. Behind the last mixer only the given rows are computed: their MLP, norm
    and read-out. `tied` reads out with the token embedding. A learned memory hashes the sum: with
    positions that start at 0 (`position_std`) a key has one address wherever it stands.
    """

    def __init__(self, config: ModelConfig, task: SequenceTask) -> None:
        super().__init__()
        width, payload, vocab_size = config.width, task.payload_dim, task.vocab_size
        positions = torch.empty(task.max_length, width) if config.learned_positions else None
        self.tokens = nn.Embedding(vocab_size, width) if vocab_size else None
        self.payload_in = nn.Linear(payload, width, bias=False) if payload else None
        self.positions = None if positions is None else nn.Parameter(positions)
        self.blocks = nn.ModuleList(
            Block(
                make_mixer(config.mixer, width, task, **config.options),
                config.norm,
                mlp_ratio=config.mlp_ratio,
            )
            for _ in range(config.num_layers)
        )
        self.norm = make_norm(config.norm, width)
        self.head = nn.Linear(width, task.num_outputs, bias=not config.tied)
        if self.tokens is not None:
            nn.init.normal_(self.tokens.weight, std=0.02)
        if self.positions is not None:
            nn.init.normal_(self.positions, std=config.position_std)
        if config.tied:
            if self.tokens is None or task.vocab_size != task.num_outputs:
                raise ValueError("a tied read-out needs as many tokens as outputs")
            self.head.weight = self.tokens.weight

    def forward(
        self, rows: Tensor | None = None, targets: Tensor | None = None, **inputs: Tensor
    ) -> Tensor:
        """Return the outputs at rows (B, R), or at all positions: (B, R, num_outputs).

        With targets (B, T) it is the cross-entropy of each, without all logits at once.
        """
        known = []
        if self.tokens is not None:
            known.append(self.tokens(inputs["token_ids"]))
        if self.payload_in is not None:
            known.append(self.payload_in(inputs["payload"]))
        if self.positions is not None:
            known.append(self.positions[: known[0].shape[1]])
        x = sum(known[1:], start=known[0])
        *first, last = self.blocks
        for block in first:
            x = block(x, None, inputs)
        if targets is not None:
            return token_losses(self.norm(last(x, None, inputs)), self.head, targets)
        return self.head(self.norm(last(x, rows, inputs)))

    def balance_loss(self) -> Tensor | None:
        """Return the balance losses of the last call, or None if no layer has one."""
        return sum_balance_losses(self)
