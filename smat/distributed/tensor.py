"""Tensor parallelism for models of this library: the heads of every mixer over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

Model = TypeVar("Model", bound=nn.Module)


def tensor_parallel(model: Model, mesh: Any = None, plan: Mapping[str, Any] | None = None) -> Model:
    """Deal the heads of a model's mixers, and its MLPs, over the ranks of a mesh, in place.

    >>> tensor_parallel(nn.Linear(2, 2))
    Traceback (most recent call last):
    RuntimeError: tensor parallelism needs torch.distributed.init_process_group

    `mesh` is one of one dimension, such as ``mesh["tp"]``; None is one of all ranks. All ranks call
    the model with the same inputs, get the same outputs, and call backward on the same loss. `plan`
    adds styles of ``torch.distributed.tensor.parallel`` for other parts, by the names of modules.
    Every parameter becomes a DTensor, with the values of the first rank: make optimisers, and shard
    by FSDP2 over another dimension of the mesh, after it. ``model.state_dict()``, called by all
    ranks, is that of one process, and ``load_state_dict`` takes one. A cache holds a rank's own
    heads.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("tensor parallelism needs torch.distributed.init_process_group")
    from smat.distributed.plans import parallelize  # which loads what DTensor needs

    if mesh is None:
        kind = next(model.parameters()).device.type
        mesh = dist.device_mesh.init_device_mesh(kind, (dist.get_world_size(),))
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        raise ValueError(f"heads are dealt over one dimension of a mesh, got {names or mesh.shape}")
    parallelize(model, mesh, plan)
    return model
