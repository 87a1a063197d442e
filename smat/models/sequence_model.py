"""One skeleton for every experiment: embed, mix, and read out only the rows that count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from smat.layers import sum_balance_losses
from smat.layers.primitives import RMSNorm
from smat.models.mixers import call_mixer, make_mixer

if TYPE_CHECKING:
    from smat.models.config import ModelConfig

NORMS = {"rms": RMSNorm, "layer": nn.LayerNorm}


class Block(nn.Module):
    """h + mixer(norm(h)), then h + MLP(norm(h)) at the rows that are wanted."""

    def __init__(self, mixer: nn.Module, width: int, mlp_ratio: float, norm: str) -> None:
        super().__init__()
        self.norm = NORMS[norm](width)
        self.mixer = mixer
        inner = round(mlp_ratio * width)
        self.mlp_norm = NORMS[norm](width) if inner else None
        self.mlp = (
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            if inner
            else None
        )

    def forward(self, x: Tensor, rows: Tensor | None, inputs: dict[str, Any]) -> Tensor:
        """(B, T, width) -> (B, T, width), or (B, R, width) at rows (B, R)."""
        mixed = call_mixer(self.mixer, self.norm(x), rows, inputs)
        return self._behind(mixed + (x if rows is None else take_rows(x, rows)))

    def _behind(self, x: Tensor) -> Tensor:
        if self.mlp is None or self.mlp_norm is None:
            return x
        return x + self.mlp(self.mlp_norm(x))


class SequenceModel(nn.Module):
    """Embeddings, a stack of mixers, and a read-out.

    >>> from smat.models import ModelConfig
    >>> from smat.tasks import MultiKeyRecall
    >>> task = MultiKeyRecall(num_keys=1, seq_len=128)
    >>> model = SequenceModel(ModelConfig("mamba2", width=32, options={"head_dim": 16}), task)
    >>> batch = task.train_batch(step=0, batch_size=2, seed=0)
    >>> model(rows=batch.rows, **batch.inputs).shape
    torch.Size([2, 8, 8])

    Tokens, payloads and learned positions (where the task and the configuration have them) are
    embedded and added up. Behind the last mixer only the given rows are computed: their MLP, norm
    and read-out. `tied` reads out with the token embedding.
    """

    def __init__(self, config: ModelConfig, task: Any) -> None:
        super().__init__()
        width = config.width
        if config.norm not in NORMS:
            raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {config.norm!r}")
        self.tokens = nn.Embedding(task.vocab_size, width) if task.vocab_size else None
        self.payload_in = (
            nn.Linear(task.payload_dim, width, bias=False) if task.payload_dim else None
        )
        self.positions = (
            nn.Parameter(torch.empty(task.max_length, width)) if config.learned_positions else None
        )
        self.blocks = nn.ModuleList(
            Block(make_mixer(config, task), width, config.mlp_ratio, config.norm)
            for _ in range(config.num_layers)
        )
        self.norm = NORMS[config.norm](width)
        self.head = nn.Linear(width, task.num_outputs, bias=not config.tied)
        for table in (self.tokens.weight if self.tokens else None, self.positions):
            if table is not None:
                nn.init.normal_(table, std=0.02)
        if config.tied:
            if self.tokens is None or task.vocab_size != task.num_outputs:
                raise ValueError("a tied read-out needs as many tokens as outputs")
            self.head.weight = self.tokens.weight

    def forward(self, rows: Tensor | None = None, **inputs: Tensor) -> Tensor:
        """Return the outputs at rows (B, R), or at all positions: (B, R, num_outputs)."""
        x = self.embed(inputs)
        last = len(self.blocks) - 1
        for number, block in enumerate(self.blocks):
            x = block(x, rows if number == last else None, inputs)
        return self.head(self.norm(x))

    def embed(self, inputs: dict[str, Tensor]) -> Tensor:
        """Add up what the inputs of a batch say about each position."""
        x: Tensor | None = None
        if self.tokens is not None:
            x = self.tokens(inputs["token_ids"])
        if self.payload_in is not None:
            payload = self.payload_in(inputs["payload"])
            x = payload if x is None else x + payload
        assert x is not None, "a task has tokens or payloads"
        return x if self.positions is None else x + self.positions[: x.shape[1]]

    def balance_loss(self) -> Tensor | None:
        """Return the balance losses of the last call, or None if no layer has one."""
        return sum_balance_losses(self)


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Gather rows (B, R) of x (B, T, width)."""
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
