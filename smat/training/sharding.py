"""Parameters over ranks: shard a model (FSDP2), and take its state together and apart again.

The heads of a model may be dealt over ranks too (`smat.tensor_parallel`). A checkpoint holds whole
tensors, whatever number of ranks wrote it: any number goes on from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from smat.distributed.plans import cuts_of, like
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


def whole_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Put the state of an optimiser together, its moments in the order of whole parameters."""
    found, cuts = whole(optimizer.state_dict()), cuts_of(model)
    parameters = [x for group in optimizer.param_groups for x in group["params"]]
    for index, moments in found["state"].items():
        cut = cuts.get(parameters[index])
        for name, x in moments.items():
            if cut is not None and isinstance(x, Tensor) and x.ndim:
                moments[name] = cut.collect(x)
    return found


def own_part(x: Tensor | None) -> Tensor | None:
    """Return what this rank holds of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def load_whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: Any, moments: Any
) -> None:
    """Give a model and its optimiser what was made whole of their states, sharded or not."""
    own = model.state_dict()
    if own.keys() != weights.keys():
        raise ValueError(f"weights are {sorted(weights)}, but the model has {sorted(own)}")
    model.load_state_dict({name: like(weights[name], x) for name, x in own.items()})
    optimizer.load_state_dict(moments)
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without Fabric around it
    cuts = cuts_of(model)
    for parameter, state in optimizer.state.items():
        for name, x in state.items():
            if isinstance(x, Tensor) and x.shape == parameter.shape and x.ndim:
                state[name] = like(x, parameter, cuts.get(parameter))
