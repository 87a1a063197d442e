"""The byte model of byte_model.py over several ranks: parameters sharded, sequences cut.

    torchrun --standalone --nproc_per_node=4 examples/byte_model_ranks.py novel.txt --length 4096
    torchrun --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=host:29400 \\
        examples/byte_model_ranks.py novel.txt --context-ranks 8

All ranks hold a part of every parameter (FSDP2). `--tensor-ranks` of them share the heads and
hidden units of every layer, `--context-ranks` such groups hold a sequence together, all unless
told, and the others take other sequences. Start it again with the same
command, on any number of ranks, and it goes on from its last checkpoint in --out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from byte_model import ByteModel, read_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import smat
from smat.distributed.plans import MLPParallel
from smat.training.checkpoint import load_checkpoint, save_checkpoint
from smat.training.sharding import load_whole, shard, whole, whole_moments

PATIENCE = timedelta(seconds=45)  # with a rank that says nothing


def draw(text: Tensor, step: int, count: int, length: int) -> Tensor:
    """Draw the windows (count, length + 1) of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length, (count, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()


def make(chosen: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Build the model, the same on every rank and sharded over all, and its optimiser."""
    torch.manual_seed(0)
    model, mesh = ByteModel(chosen.width), None
    model.to(torch.float64 if chosen.dtype == "float64" else torch.float32)
    if chosen.tensor_ranks > 1:
        groups = dist.get_world_size() // chosen.tensor_ranks
        mesh = init_device_mesh("cpu", (groups, chosen.tensor_ranks), mesh_dim_names=("dp", "tp"))
        smat.tensor_parallel(model, mesh["tp"], {"blocks.*.mlp": MLPParallel()})
        mesh = mesh["dp"]
    shard(model, mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)


def train(text: Tensor, chosen: argparse.Namespace) -> list[float]:
    """Train to the end, from the last checkpoint if there is one; return the loss of every step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = size // chosen.tensor_ranks  # each of which is one rank to all others
    over = chosen.context_ranks or groups
    shape = (groups // over, over, chosen.tensor_ranks)
    if groups * chosen.tensor_ranks != size or chosen.batch * over % groups or chosen.length % over:
        raise SystemExit(
            f"{size} ranks, {over} x {chosen.tensor_ranks} to a sequence, cannot take "
            f"{chosen.batch} sequences of {chosen.length} bytes each in equal parts"
        )
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp", "tp"))
    model, optimizer = make(chosen)
    state, _ = load_checkpoint(chosen.out)
    losses: list[float] = []
    if state is not None:
        load_whole(model, optimizer, state["model"], state["optimizer"])
        losses = state["losses"]
    while len(losses) < chosen.steps:
        step = len(losses)
        windows = draw(text, step, chosen.batch, chosen.length)
        windows = windows.chunk(mesh.size(0))[mesh.get_local_rank("dp")]
        bytes_in, targets = (
            x.chunk(over, 1)[mesh.get_local_rank("cp")] for x in (windows[:, :-1], windows[:, 1:])
        )
        with smat.context_parallel(mesh["cp"]):
            with torch.autocast("cpu", torch.bfloat16, enabled=chosen.dtype == "bfloat16"):
                logits, _ = model(bytes_in)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = loss.detach().double() / size
        dist.all_reduce(mean)
        losses.append(mean.item())
        if len(losses) % chosen.keep == 0 or len(losses) == chosen.steps:
            weights, moments = whole(model.state_dict()), whole_moments(model, optimizer)
            if rank == 0:
                kept = {"step": len(losses), "losses": losses}
                save_checkpoint(chosen.out, {**kept, "model": weights, "optimizer": moments})
                print(f"step {len(losses):4}: loss {losses[-1]:.4f}", flush=True)
    return losses


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a byte model over several ranks.")
    parser.add_argument("text", nargs="?", type=Path, help="a text file (this library's sources)")
    sizes = {"steps": 500, "length": 1024, "batch": 8, "width": 128, "keep": 50}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--context-ranks", type=int, help="ranks that share a sequence (all)")
    parser.add_argument("--tensor-ranks", type=int, default=1, help="ranks that share heads (1)")
    dtypes = ["float32", "float64", "bfloat16"]
    parser.add_argument("--dtype", default="float32", choices=dtypes, help="bfloat16 by autocast")
    parser.add_argument("--out", type=Path, default=Path("out/byte-model-ranks"))
    chosen = parser.parse_args(words)
    if "RANK" not in os.environ:
        raise SystemExit("start it by torchrun: see the head of this file")
    dist.init_process_group("gloo", timeout=PATIENCE)
    rank = dist.get_rank()
    try:
        losses = train(read_text(chosen.text), chosen)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        kept = f"what {chosen.out} keeps is whole: start again, on any number of ranks"
        print(
            f"rank {rank} cannot go on, another one may be gone ({reason}); {kept}", file=sys.stderr
        )
        time.sleep(1)  # so that it is read before the others are ended
        raise SystemExit(1) from None
    if rank == 0:
        (chosen.out / "losses.json").write_text(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
