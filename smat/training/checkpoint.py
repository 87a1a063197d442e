"""Checkpoints that outlive a kill: written whole, checked when read, the one before kept."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from smat.extras import require

CURRENT = "checkpoint.pt"
PREVIOUS = "checkpoint.previous.pt"
WEIGHTS = "weights.safetensors"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Behind what torch writes stands the SHA-256 of it: a flipped bit anywhere is noticed.
DIGEST_SIZE = hashlib.sha256().digest_size
# What torch raises for a file that is more than data, or foreign.
UNREADABLE = (EOFError, RuntimeError, KeyError, pickle.UnpicklingError)


class CheckpointError(ValueError):
    """A folder's checkpoints are damaged."""


class DiskFullError(OSError):
    """There was no room for a file; what was there before is still whole."""


def write_atomically(path: Path, content: bytes, keep_as: Path | None = None) -> None:
    """Replace a file by new content that reaches the disk first; a kill leaves old or new.

    `keep_as` gets the old content. Without room, the old file stays and `DiskFullError` is raised.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with explain_full_disk(path, len(content)):
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if keep_as is not None and path.exists():
                os.replace(path, keep_as)
            os.replace(temporary, path)
            _sync_folder(path.parent)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def explain_full_disk(path: Path, size: int = 1) -> Iterator[None]:
    """Turn the system's error for a full disk into one that says what did not fit, and what to do.

    >>> with explain_full_disk(Path("record.json"), 2_000_000):
    ...     raise OSError(errno.ENOSPC, "No space left on device")
    Traceback (most recent call last):
    smat.training.checkpoint.DiskFullError: no room for record.json: it needs 2.00 MB, ...
    """
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        free = shutil.disk_usage(folder).free
        raise DiskFullError(
            f"no room for {path}: it needs {size / 1e6:.2f} MB, {free / 1e6:.2f} MB are free; what "
            "was written before is whole, so make room and run the same command again to go on"
        ) from error


def save_checkpoint(folder: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint; the one before it stays until the new one is whole, and beside it."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    content = sealed(buffer.getvalue())
    write_atomically(folder / CURRENT, content, keep_as=folder / PREVIOUS)


def sealed(content: bytes) -> bytes:
    """Put a checksum behind the content of a checkpoint.

    >>> len(sealed(b"weights")) - len(b"weights")
    32
    """
    return content + hashlib.sha256(content).digest()


def load_checkpoint(folder: Path) -> tuple[dict[str, Any] | None, str | None]:
    """Return the newest whole checkpoint, or None, and what to tell if a newer one is damaged."""
    damage: list[str] = []
    for path in (folder / CURRENT, folder / PREVIOUS):
        try:
            state = _read(path)
        except FileNotFoundError:  # no such checkpoint, or a run that is at work has just moved it
            continue
        except CheckpointError as error:
            damage.append(str(error))
        else:
            going_on = f"; going on from {path.name}, step {state['step']}"
            return state, damage[0] + going_on if damage else None
    if damage:
        files = " ".join(str(path) for path in _files(folder) if path.exists())
        message = f"{'; '.join(damage)}; no whole checkpoint is left"
        raise CheckpointError(f"{message}, so to start this run anew: rm {files}")
    return None, None


def newest_step(folder: Path) -> int | None:
    """Return the step from which a run would go on; None without a whole checkpoint."""
    try:
        state, _ = load_checkpoint(folder)
    except (CheckpointError, OSError):
        return None
    return None if state is None else state["step"]


def remove_checkpoints(folder: Path) -> None:
    """Delete the checkpoints of a finished run."""
    for path in _files(folder):
        path.unlink(missing_ok=True)


def save_weights(folder: Path, state: Mapping[str, Any]) -> None:
    """Write final weights as safetensors; tied weights are written under each of their names."""
    safetensors = require("safetensors.torch", extra="train")
    weights = {
        name: weight.detach().cpu().clone().contiguous()
        for name, weight in state.items()
        if isinstance(weight, Tensor)
    }
    write_atomically(folder / WEIGHTS, safetensors.save(weights))


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read what `save_weights` wrote, for `load_state_dict`."""
    return require("safetensors.torch", extra="train").load_file(folder / WEIGHTS)


def _read(path: Path) -> dict[str, Any]:
    """Read a checkpoint, of which nothing is looked at before its checksum is right."""
    content = path.read_bytes()
    try:
        if sealed(content[:-DIGEST_SIZE]) != content:
            raise EOFError(f"the checksum of its {len(content)} bytes is wrong")
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not isinstance(state.get("step"), int):
            raise EOFError("it tells of no step")
    except UNREADABLE as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"checkpoint {path} is damaged ({reason})") from error
    return state


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in (CURRENT, PREVIOUS, f".{CURRENT}.tmp")]


def _sync_folder(folder: Path) -> None:
    """Make a rename outlive a power cut, where the system can."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
