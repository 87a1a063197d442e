"""Decoding states as safetensors files: versioned, complete, and checked on loading."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from smat.extras import require
from smat.masks import SMatMask
from smat.ops.feature_maps import FeatureMap
from smat.ops.state import GATES, STATES, StateSizes, StateTables, check_dtype

FORMAT = "smat.state"
VERSION = 1


def save_state(state: StateTables, path: str | os.PathLike[str]) -> None:
    """Write a state to a file; a file that is there already is replaced in one step."""
    safetensors = require("safetensors.torch", "hf")
    about = {
        "mask": state.mask.to_dict(),
        "sizes": asdict(state.sizes),
        "fold": state.fold,
        "positions": state.positions,
        "built": state.built,
        "feature_map": state.feature_map if isinstance(state.feature_map, str) else None,
    }
    metadata = {"format": FORMAT, "version": str(VERSION), "state": json.dumps(about)}
    tensors = {name: x.detach().contiguous() for name, x in state.tensors.items()}
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        safetensors.save_file(tensors, unfinished, metadata)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def load_arguments(
    path: str | os.PathLike[str],
    mask: SMatMask | None,
    feature_map: FeatureMap | None,
    device: torch.device | str,
) -> dict[str, Any]:
    """Read a file and check it: the arguments from which the state is built again."""
    safetensors = require("safetensors", "hf")
    with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
        metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT or metadata.get("version") != str(VERSION):
            raise ValueError(
                f"{path} must hold {FORMAT!r} version {VERSION}, but it says "
                f"{metadata.get('format')!r} version {metadata.get('version')}"
            )
        about = json.loads(metadata["state"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    saved = SMatMask.from_dict(about["mask"])
    _check_recipe(path, saved, mask, about["feature_map"], feature_map)
    return {
        "mask": saved if mask is None else mask,
        "sizes": StateSizes(**about["sizes"]),
        "feature_map": feature_map if about["feature_map"] is None else about["feature_map"],
        "fold": about["fold"],
        "tensors": tensors,
        "positions": about["positions"],
        "built": about["built"],
    }


def _check_recipe(
    path: str | os.PathLike[str],
    saved: SMatMask,
    mask: SMatMask | None,
    saved_map: str | None,
    feature_map: FeatureMap | None,
) -> None:
    """Refuse a file of another mask, or of another feature map."""
    if mask is not None and not _same_tables(mask, saved):
        raise ValueError(
            f"the state in {path} belongs to {saved.describe()}; it cannot go on under "
            f"{mask.describe()}"
        )
    if saved_map is None and feature_map is None:
        raise ValueError(f"the state in {path} used a feature map of its own: pass feature_map")
    if saved_map is not None and feature_map not in (None, saved_map):
        raise ValueError(f"the state in {path} used feature map {saved_map!r}, not {feature_map!r}")


def _same_tables(first: SMatMask, second: SMatMask) -> bool:
    """Whether two masks give every token the same place; they may be written differently."""
    return (first.seq_len, first.geometry, first.schedule) == (
        second.seq_len,
        second.geometry,
        second.schedule,
    )


def check_tensors(state: StateTables, path: str | os.PathLike[str]) -> None:
    """Refuse a loaded state whose tensors are not those that its sizes and positions call for."""
    shapes, tensors = state.shapes(), state.tensors
    check_dtype(state.dtype)
    for name in sorted({*tensors, *_needed(state)}):
        if name not in tensors or name not in shapes:
            raise ValueError(f"{path}: the state needs {_needed(state)}, but has {sorted(tensors)}")
        x, dtype = tensors[name], _dtype(state, name)
        if tuple(x.shape) != shapes[name] or x.dtype != dtype:
            raise ValueError(
                f"{path}: {name} must be {dtype} of shape {shapes[name]}, but it is {x.dtype} of "
                f"shape {tuple(x.shape)}"
            )
    if len(state.positions) != len(state) or min(state.positions, default=0) < 0:
        raise ValueError(f"{path}: {len(state)} rows stand at positions {state.positions}")


def _needed(state: StateTables) -> list[str]:
    """List the tensors that a state cannot do without."""
    needed = ["recent"]
    last = [max(0, position - 1) for position in state.positions]
    moments = [state.timeline.at(position) for position in last]
    if any(moment.folds for moment in moments):
        needed += ["profile_epoch", "profile_table"]
    if state.timeline.num_slots > 1 or any(moment.segment for moment in moments):
        needed.append("type_table")
    if any(name in state.tensors for name in GATES):
        needed += ["edge_log_decay", "log_decay"]
        needed += ["profile_log_decay"] if "profile_table" in needed else []
    return needed


def _dtype(state: StateTables, name: str) -> torch.dtype:
    if name in STATES:
        return state.dtype
    return torch.float64 if name in GATES else torch.long
