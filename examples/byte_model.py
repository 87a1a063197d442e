"""A byte model from nothing to generated text: read a text, train, go on writing it.

    python examples/byte_model.py                      # learns the sources of this library
    python examples/byte_model.py novel.txt --prompt "It was" --steps 1000

Every layer is linear attention whose recent keys decay, under a mask of VC dimension 2 with a
stepped window: a byte sees the last bytes as they are, and of everything older what once followed
bytes like itself. Nothing in the model knows a longest length: it writes on for ever.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import smat
from smat.layers import HashedRouting, MixerCache


class Block(nn.Module):
    """h + mixer(norm(h)), then h + MLP(norm(h))."""

    def __init__(self, width: int, window: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        # A byte is filed under a hash of the byte before it, and reads what is filed under its own.
        self.mixer = smat.SMatAttention(
            width, num_heads=4, vc_dim=2, horizon=4 * window,
            boundary=smat.schedules.window(window), routing=HashedRouting(256, 4, write_lag=1),
            decay_gate=True, decay_scope="recurrent", read_gate=True, output_gate=True,
            output_norm=True, conv_size=4,
        )  # fmt: skip
        self.mlp = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self, x: Tensor, ids: Tensor, cache: MixerCache | None = None, use_cache: bool = False
    ) -> tuple[Tensor, MixerCache | None]:
        normed = self.norm(x)
        mixed, _, cache = self.mixer(normed, None, cache, use_cache, inplace=True, token_ids=ids)
        x = x + mixed
        return x + self.mlp(x), cache


class ByteModel(nn.Module):
    """Embed bytes, mix them, predict the next one."""

    def __init__(self, width: int = 128, num_layers: int = 2, window: int = 64) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, window) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(
        self, ids: Tensor, caches: list[MixerCache | None] | None = None, use_cache: bool = False
    ) -> tuple[Tensor, list[MixerCache | None]]:
        """Return logits (B, T, 256), and a cache a layer to go on from if it is asked for."""
        x, after = self.bytes(ids), []
        for block, cache in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
            x, cache = block(x, ids, cache, use_cache)
            after.append(cache)
        return self.norm(x) @ self.bytes.weight.T, after

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean loss in nats of windows (B, T + 1)."""
        logits, _ = self(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    @torch.no_grad()
    def write(self, prompt: bytes, length: int, temperature: float = 0.7) -> bytes:
        """Go on from a prompt, byte by byte, each in constant time."""
        written, ids, caches = list(prompt), torch.tensor([list(prompt)]), None
        for _ in range(length):
            logits, caches = self(ids, caches, use_cache=True)
            chances = (logits[:, -1].float() / temperature).softmax(-1)
            ids = torch.multinomial(chances, 1)
            written.append(int(ids))
        return bytes(written)


def read_text(path: Path | None) -> Tensor:
    """Return a file as bytes, or the sources of this library if none is named."""
    sources = sorted(Path(smat.__file__).parent.rglob("*.py"))
    text = b"\n".join(each.read_bytes() for each in ([path] if path else sources))
    if len(text) < 10_000:
        raise SystemExit(
            f"{path} has {len(text)} bytes; a model needs 10,000 or more to learn from"
        )
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def draw(text: Tensor, count: int, length: int) -> Tensor:
    """Draw windows (count, length + 1) of the text at random places."""
    starts = torch.randint(len(text) - length, (count, 1))
    return text[starts + torch.arange(length + 1)].long()


def arguments(words: list[str] | None) -> argparse.Namespace:
    """Read the command line, which the Lightning example shares."""
    parser = argparse.ArgumentParser(description="Train a byte model on a text, and let it write.")
    parser.add_argument("text", nargs="?", type=Path, help="a text file (this library's sources)")
    parser.add_argument("--prompt", default="def ", help="what the model goes on from")
    sizes = {"steps": 500, "length": 256, "batch": 8, "width": 128, "write": 400}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path("out/byte-model"))
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    chosen = arguments(words)
    torch.manual_seed(0)
    text = read_text(chosen.text)
    train, held_out = text[: -len(text) // 10], text[-len(text) // 10 :]
    model = ByteModel(chosen.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=chosen.steps + 1, pct_start=0.1
    )
    start = time.monotonic()
    for step in range(1, chosen.steps + 1):
        loss = model.loss(draw(train, chosen.batch, chosen.length))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == chosen.steps:
            bits, seconds = loss.item() / math.log(2), time.monotonic() - start
            print(f"step {step:4}: {bits:.3f} bits per byte, {seconds:.0f} s", flush=True)
    with torch.no_grad():
        bits = model.loss(draw(held_out, 16, min(4 * chosen.length, len(held_out) - 1))).item()
    print(f"held out, at four times the length: {bits / math.log(2):.3f} bits per byte\n")
    print(model.write(chosen.prompt.encode(), chosen.write).decode(errors="replace"))


if __name__ == "__main__":
    main()
