"""Tensor parallelism: plans by which torch's `parallelize_module` deals heads over ranks.

Every parameter becomes a DTensor of the mesh, cut by heads or whole on every rank, so that
clipping, optimisers and FSDP2 on another dimension of the mesh take all of them alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from smat.distributed.heads import Cut, HeadRanks


class HeadParallel(ParallelStyle):
    """The style of a mixer or a block of this library, for a plan of `parallelize_module`."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        split: Any = getattr(module, "split_over", None)
        if split is None:
            raise ValueError(f"a {type(module).__name__} has no heads to deal over ranks")
        split(HeadRanks(device_mesh))
        return module


class MLPParallel(ParallelStyle):
    """The style of an MLP of two linear maps, which deals its hidden units over ranks."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        HeadRanks(device_mesh).split_mlp(module)
        return module


def parallelize(
    model: nn.Module, mesh: Any, plan: Mapping[str, ParallelStyle] | None = None
) -> nn.Module:
    """Do what `tensor_parallel` says, on a mesh."""
    if any(isinstance(each, DTensor) for each in model.parameters()):
        raise ValueError("parameters are dealt over ranks already: deal heads first, then shard")
    own = {
        name: HeadParallel() for name, each in model.named_modules() if hasattr(each, "split_over")
    }
    parallelize_module(model, mesh, {**own, **(plan or {})})
    whole = Cut(HeadRanks(mesh), adds_up=False)
    made: dict[Tensor, nn.Parameter] = {}  # a parameter that modules share stays one
    for module in model.modules():
        names = [name for name, x in module._parameters.items() if not isinstance(x, DTensor)]
        hold(module, dict.fromkeys(names, whole), made)
    return model


def hold(
    module: nn.Module, cuts: Mapping[str, Cut], made: dict[Tensor, nn.Parameter] | None = None
) -> None:
    """Replace parameters by what ranks hold of them; the module itself reads its own part.

    States are loaded and saved whole, with the names and shapes of one process.
    """
    made = {} if made is None else made
    cuts = {name: cut for name, cut in cuts.items() if module._parameters[name] is not None}
    if not cuts:
        return
    for name, cut in cuts.items():
        old = module._parameters[name]
        assert old is not None
        if old not in made:
            made[old] = _distributed(old, cut)
        module._parameters[name] = made[old]
    known: Any = module
    if not hasattr(module, "cuts_by_name"):
        known.cuts_by_name = {}
        module.register_state_dict_post_hook(_save_whole)
        module.register_load_state_dict_pre_hook(_load_whole)
    known.cuts_by_name = {**known.cuts_by_name, **cuts}
    properties = {name: property(partial(_read, name=name)) for name in cuts}
    module.__class__ = type(type(module).__name__, (type(module),), properties)


def _read(module: Any, name: str) -> Tensor | None:
    held = module._parameters[name]
    if held is None or held.device_mesh.ndim > 1:  # sharded by FSDP2, which looks after it itself
        return held
    return module.cuts_by_name[name].local(held)


def _distributed(old: nn.Parameter, cut: Cut) -> nn.Parameter:
    """Deal a parameter out, as the first rank has it."""
    placement = Shard(cut.dim) if cut.is_dealt else Replicate()
    dealt = distribute_tensor(cut.deal(old.detach()), cut.ranks.mesh, [placement])
    new = nn.Parameter(dealt, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)  # such as that weight decay leaves it alone
    return new


@torch.no_grad()
def _save_whole(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name, cut in module.cuts_by_name.items():
        held = state.get(prefix + name)
        if isinstance(held, DTensor):
            state[prefix + name] = cut.collect(held.full_tensor())


@torch.no_grad()
def _load_whole(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name, cut in module.cuts_by_name.items():
        given, own = state.get(prefix + name), module._parameters[name]
        if isinstance(given, Tensor) and not isinstance(given, DTensor):
            state[prefix + name] = like(given, own, cut)


def cuts_of(model: nn.Module) -> dict[Tensor, Cut]:
    """Return how ranks hold the parameters of a model whose heads are dealt; else nothing."""
    modules: list[Any] = [each for each in model.modules() if hasattr(each, "cuts_by_name")]
    return {
        each._parameters[name]: cut for each in modules for name, cut in each.cuts_by_name.items()
    }


def like(x: Tensor, other: Tensor, cut: Cut | None = None) -> Tensor:
    """Deal out a tensor that all ranks have whole, as another of its shape is."""
    if not isinstance(other, DTensor) or x.shape != other.shape:
        return x
    dealt = x if cut is None else cut.deal(x)
    return distribute_tensor(
        dealt.to(other.device), other.device_mesh, other.placements, src_data_rank=None
    )
