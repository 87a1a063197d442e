"""What every model is stacked of: norm, mixer, residual, and an MLP if it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from smat.distributed import HeadRanks
from smat.layers import Mixer
from smat.layers.primitives import RMSNorm

NORMS: dict[str, Callable[..., nn.Module]] = {"rms": RMSNorm, "layer": nn.LayerNorm}


def make_norm(kind: str, width: int, eps: float = 1e-5) -> nn.Module:
    """Make a norm by its name.

    >>> make_norm("layer", 8, eps=1e-6).eps
    1e-06
    """
    if kind not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {kind!r}")
    return NORMS[kind](width, eps=eps)


class Block(nn.Module):
    """h + mixer(norm(h)), then h + MLP(norm(h)) at the rows that are wanted.

    >>> import torch
    >>> from smat.layers import DeltaNet
    >>> block = Block(DeltaNet(32, num_heads=2, head_dim=16), mlp_ratio=4.0)
    >>> block(torch.randn(2, 10, 32)).shape
    torch.Size([2, 10, 32])
    """

    def __init__(
        self, mixer: Mixer, norm: str = "rms", norm_eps: float = 1e-5, mlp_ratio: float = 0.0
    ) -> None:
        super().__init__()
        width, inner = mixer.hidden_size, round(mlp_ratio * mixer.hidden_size)
        self.norm, self.mixer = make_norm(norm, width, norm_eps), mixer
        self.mlp_norm = self.mlp = None
        if inner:
            self.mlp_norm = make_norm(norm, width, norm_eps)
            self.mlp = nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))

    def forward(
        self, x: Tensor, rows: Tensor | None = None, inputs: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """(B, T, width) -> (B, T, width), or (B, R, width) at rows (B, R).

        Where all examples ask at the same rows, a mixer may make these alone.
        """
        normed, extras = self.norm(x), self.extras_of(inputs or {})
        if rows is not None and bool((rows == rows[0]).all()):
            mixed = self.mixer(normed, positions=rows[0], **extras)[0]
        else:
            mixed = self.mixer(normed, **extras)[0]
            mixed = mixed if rows is None else take_rows(mixed, rows)
        return self.finish(x if rows is None else take_rows(x, rows), mixed)

    def split_over(self, ranks: HeadRanks) -> None:
        """Keep the MLP's hidden units of this rank alone; the mixer is told for itself."""
        if self.mlp is not None:
            ranks.split_mlp(self.mlp)

    def extras_of(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return those inputs of a model that the mixer takes beside hidden states."""
        return {name: each for name, each in inputs.items() if name in self.mixer.extra_inputs}

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add what was mixed, and what the MLP makes of the sum."""
        x = x + mixed
        if self.mlp is None or self.mlp_norm is None:
            return x
        return x + self.mlp(self.mlp_norm(x))


def take_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Gather rows (B, R) of x (B, T, width).

    >>> import torch
    >>> take_rows(torch.arange(6.0).view(1, 3, 2), torch.tensor([[2]]))
    tensor([[[4., 5.]]])
    """
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))
