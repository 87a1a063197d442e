"""Decoding states as safetensors files: versioned, complete, and checked on loading."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from smat.extras import require
from smat.masks import SMatMask
from smat.ops.feature_maps import FeatureMap
from smat.ops.smat.fold import num_slabs
from smat.ops.smat.state import GATES, StateSpec, StateTables, check_dtype

FORMAT = "smat.state"
VERSION = 2
MAX_POSITION = 1 << 60

State = TypeVar("State", bound=StateTables)


def save_state(state: StateTables, path: str | os.PathLike[str]) -> None:
    """Write a state to a file; a file that is there already is replaced in one step."""
    safetensors = require("safetensors.torch", "hf")
    about = json.dumps(
        {
            "mask": state.mask.to_dict(),
            "spec": asdict(state.spec),
            "positions": state.positions,
            "built": state.built,
            "feature_map": state.feature_map if isinstance(state.feature_map, str) else None,
        }
    )
    tensors = {name: x.detach().contiguous() for name, x in state.tensors.items()}
    metadata = {"format": FORMAT, "version": str(VERSION), "state": about}
    metadata["checksum"] = checksum(about, tensors)
    target = Path(path)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        safetensors.save_file(tensors, unfinished, metadata)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)


def load_state(
    kind: type[State],
    path: str | os.PathLike[str],
    mask: SMatMask | None,
    feature_map: FeatureMap | None,
    device: torch.device | str,
) -> State:
    """Read a file, and refuse one that is damaged, foreign, or of another mask or feature map."""
    about, tensors = _read(path, device)
    try:
        saved, spec = SMatMask.from_dict(about["mask"]), StateSpec(**about["spec"])
        positions, built, saved_map = about["positions"], about["built"], about["feature_map"]
        used_map = _check_recipe(path, saved, mask, saved_map, feature_map)
        _check_numbers(path, positions, built, tensors)
        state = kind(saved if mask is None else mask, spec, used_map, tensors, positions, built)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no complete state: {error}") from None
    _check_tensors(state, path)
    return state


def checksum(about: str, tensors: Mapping[str, Tensor]) -> str:
    """Sum up a state so that one flipped bit, or two, cannot go unnoticed."""
    parts = [hashlib.sha256(about.encode()).hexdigest()]
    for name, x in sorted(tensors.items()):
        content = x.reshape(-1).view(torch.uint8)
        words = F.pad(content, (0, -len(content) % 8)).view(torch.int64)
        # An odd factor for each word: no power of 2 times one is that of another. Halves are summed
        # apart, since the top bit of a whole word would leave the same remainder in all of them.
        place = 2 * torch.arange(len(words), device=x.device) + 1
        halves = ((each * place).sum() for each in (words >> 32, words & 0xFFFFFFFF))
        parts.append(f"{name}:{':'.join(str(int(half)) for half in halves)}")
    return " ".join(parts)


def _read(
    path: str | os.PathLike[str], device: torch.device | str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    safetensors = require("safetensors", "hf")
    try:
        with safetensors.safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file: {error}") from None
    if metadata.get("format") != FORMAT or metadata.get("version") != str(VERSION):
        raise ValueError(
            f"{path} must hold {FORMAT!r} version {VERSION}, but it says "
            f"{metadata.get('format')!r} version {metadata.get('version')}"
        )
    about = metadata.get("state", "")
    if metadata.get("checksum") != checksum(about, tensors):
        raise ValueError(f"{path} is damaged: its checksum does not match its content")
    return json.loads(about), tensors


def _check_recipe(
    path: str | os.PathLike[str],
    saved: SMatMask,
    mask: SMatMask | None,
    saved_map: str | None,
    feature_map: FeatureMap | None,
) -> FeatureMap:
    """Refuse a file of another mask, or of another feature map; return the one to use."""
    if mask is not None:  # which may be written differently, but gives every token its place
        own, other = ((x.seq_len, x.geometry, x.schedule) for x in (saved, mask))
        if own != other:
            raise ValueError(
                f"the state in {path} belongs to {saved.describe()}; it cannot go on under "
                f"{mask.describe()}"
            )
    if saved_map is not None and feature_map not in (None, saved_map):
        raise ValueError(f"the state in {path} used feature map {saved_map!r}, not {feature_map!r}")
    used = feature_map if saved_map is None else saved_map
    if used is None:
        raise ValueError(f"the state in {path} used a feature map of its own: pass feature_map")
    return used


def _check_numbers(
    path: str | os.PathLike[str], positions: Any, built: Any, tensors: Mapping[str, Tensor]
) -> None:
    """Refuse positions and numbers of slabs that no state can have."""
    if "recent" not in tensors or tensors["recent"].ndim != 5:
        raise ValueError(f"{path}: the state needs a tensor 'recent', but has {sorted(tensors)}")
    rows = tensors["recent"].shape[1]
    for name, numbers in (("positions", positions), ("built", built)):
        whole = all(type(each) is int and 0 <= each <= MAX_POSITION for each in numbers)
        if len(numbers) != rows or not whole:
            raise ValueError(f"{path}: {rows} rows stand at {name} {numbers}")


def _check_tensors(state: StateTables, path: str | os.PathLike[str]) -> None:
    """Refuse a loaded state whose tensors are not those that its sizes and positions call for."""
    shapes, tensors = state.shapes(), state.tensors
    check_dtype(state.dtype)
    needed = _needed(state)
    for name in sorted({*tensors, *needed}):
        if name not in tensors or name not in shapes:
            raise ValueError(f"{path}: the state needs {needed}, but has {sorted(tensors)}")
        x, dtype = tensors[name], torch.float64 if name in GATES else state.dtype
        if tuple(x.shape) != shapes[name] or x.dtype != dtype:
            raise ValueError(
                f"{path}: {name} must be {dtype} of shape {shapes[name]}, but it is {x.dtype} of "
                f"shape {tuple(x.shape)}"
            )
    if max(state.built, default=0) > num_slabs(state):
        raise ValueError(f"{path}: a fold has {num_slabs(state)} slabs, but {state.built} are done")


def _needed(state: StateTables) -> list[str]:
    """List the tensors that a state cannot do without."""
    schedule, needed = state.schedule, ["recent"]
    last = [max(0, position - 1) for position in state.positions]
    endless = schedule.num_segments is None
    if state.has_tables and (
        endless or any(schedule.edge_index(at) + 1 < (schedule.num_segments or 0) for at in last)
    ):
        needed.append("profile_table")
    if state.has_tables and (endless or any(schedule.segment_index(at) for at in last)):
        needed.append("type_table")
    if any(name in state.tensors for name in GATES):
        needed += ["edge_log_decay", "log_decay"]
        needed += ["profile_log_decay"] if "profile_table" in needed else []
    return needed
