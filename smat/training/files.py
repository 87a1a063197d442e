"""Write a file whole or not at all, and say in one line when the disk is full."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskFullError(OSError):
    """There was no room for a file; what was there before is still whole."""


def write_atomically(path: Path, content: bytes, keep_as: Path | None = None) -> None:
    """Replace a file by new content that reaches the disk first; a kill leaves old or new.

    `keep_as` gets the old content. Without room, the old file stays and `DiskFullError` is raised.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if keep_as is not None and path.exists():
            os.replace(path, keep_as)
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if is_disk_full(error):
            raise disk_full(path, len(content)) from error
        raise


def is_disk_full(error: BaseException) -> bool:
    """Tell whether an error means that there is no room left.

    >>> is_disk_full(OSError(errno.ENOSPC, "No space left")), is_disk_full(OSError())
    (True, False)
    """
    return isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in FULL)


def disk_full(path: Path, size: int) -> DiskFullError:
    """Say what did not fit, how much room there is, and how to go on."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free
    return DiskFullError(
        f"no room for {path}: it needs {size / 1e6:.2f} MB, {free / 1e6:.2f} MB are free; what was "
        "written before is whole, so make room and run the same command again to go on"
    )


def _sync_folder(folder: Path) -> None:
    """Make a rename outlive a power cut, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
