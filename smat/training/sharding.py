"""Parameters over ranks (FSDP2): shard a model, and take its state together and apart again.

A checkpoint holds whole tensors, whatever number of ranks wrote it: any number goes on from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from smat.layers.primitives import keep_from_decay_


def shard(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Shard a model's parameters over the ranks of a mesh, all ranks unless given, in place.

    The blocks of a stack are gathered one at a time, when they are used. Gradients are averaged
    over ranks: each rank's loss is the mean of its own examples, or of its own tokens.
    """
    from torch.distributed.fsdp import fully_shard  # which loads the compiler

    kept = [name for name, x in model.named_parameters() if hasattr(x, "_no_weight_decay")]
    for stack in model.children():
        for block in stack if isinstance(stack, nn.ModuleList) else ():
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in kept:  # a sharded parameter is a new one
        keep_from_decay_(model.get_parameter(name))
    return model


def whole(state: Any) -> Any:
    """Put the tensors of a state together; all ranks take part."""
    return tree_map(lambda x: x.full_tensor() if isinstance(x, DTensor) else x, state)


def own_part(x: Tensor | None) -> Tensor | None:
    """Return what this rank holds of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def load_whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: Any, moments: Any
) -> None:
    """Give a model and its optimiser what `whole` made of their states, sharded or not."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        raise ValueError(f"weights are {sorted(weights)}, but the model has {sorted(own)}")
    with torch.no_grad():
        for name, x in own.items():
            x.copy_(_like(weights[name], x))
    optimizer.load_state_dict(moments)
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without Fabric around it
    for parameter, state in optimizer.state.items():
        for name, x in state.items():
            if isinstance(x, Tensor) and x.shape == parameter.shape and x.ndim:
                state[name] = _like(x, parameter)


def _like(x: Tensor, other: Tensor) -> Tensor:
    """Shard a tensor as another is; all ranks have it whole."""
    if not isinstance(other, DTensor):
        return x
    return distribute_tensor(
        x.to(other.device), other.device_mesh, other.placements, src_data_rank=None
    )
