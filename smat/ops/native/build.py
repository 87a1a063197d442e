"""Compile the C++ kernels on first use, keep them in the user's cache, load them through ctypes.

A library is keyed by its sources, the compiler, the flags and the processor. It is written under a
file lock, beside a checksum, and moved into place whole: a damaged one is compiled again, and of
several processes one compiles. Without a compiler, or with SMAT_NATIVE=0, there are no kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from smat.machine import CPUINFO, processor_name

ROOT = Path(__file__).parents[1]  # sources are named from here
HEADERS = Path(__file__).parent
# No -ffast-math: numbers that are not finite must come out as torch has them.
FLAGS = ("-O3", "-std=gnu++17", "-shared", "-fPIC", "-pthread", "-fno-math-errno",
         "-fno-trapping-math", "-ffp-contract=fast")  # fmt: skip
SWITCH, EXTRA_FLAGS = "SMAT_NATIVE", "SMAT_NATIVE_FLAGS"
PATIENCE = 300  # seconds that a compiler may take

_log = logging.getLogger("smat")
_loading = threading.Lock()
_loaded: dict[str, ctypes.CDLL | None] = {}


def _after_fork() -> None:
    """Give a copy of the process a lock that no thread holds."""
    global _loading
    _loading = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def load(source: str) -> ctypes.CDLL | None:
    """Load the library of a source below `smat/ops`, or None, which is logged once.

    >>> load("linear/native/no_such_kernel.cpp") is None
    True
    """
    if source not in _loaded:
        with _loading:
            if source not in _loaded:
                _loaded[source] = _load(source)
    return _loaded[source]


def _load(source: str) -> ctypes.CDLL | None:
    if (reason := why_not()) is not None:
        _log.info("no native kernels: %s", reason)
        return None
    try:
        with _cache_folder() as folder:
            return ctypes.CDLL(str(_find_or_compile(ROOT / source, folder)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        _log.warning("%s does without its native kernel: %s", source, " ".join(said.split())[:500])
        return None


def why_not() -> str | None:
    """Say why there are no native kernels here, or None if there may be."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    if os.name != "posix":
        return f"not on {platform.system()}"
    return (
        None if find_compiler() else "no C++ compiler: none of $CXX, g++, c++ and clang++ is here"
    )


@cache
def find_compiler() -> tuple[str, ...]:
    """Find $CXX, g++, c++ or clang++; nothing if there is none."""
    named = tuple(shlex.split(os.environ.get("CXX", "")))
    for command in (named, ("g++",), ("c++",), ("clang++",)):
        if command and shutil.which(command[0]):
            return command
    return ()


@cache
def compile_command() -> tuple[str, ...]:
    """Name the compiler and all flags; SMAT_NATIVE_FLAGS adds some, for example a sanitizer."""
    tuned = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    return (*find_compiler(), tuned, *FLAGS, *shlex.split(os.environ.get(EXTRA_FLAGS, "")))


def library_name(source: Path) -> str:
    """Name a library by everything that it depends on."""
    version = subprocess.run(
        [*find_compiler(), "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
    )
    digest = hashlib.sha256()
    for part in (version.stdout, *compile_command(), _processor()):
        digest.update(part.encode() + b"\0")
    for path in (*sorted(HEADERS.glob("*.h")), *sorted(source.parent.glob("*.h")), source):
        digest.update(path.read_bytes() + b"\0")
    return f"{source.stem}-{digest.hexdigest()[:32]}.so"


@cache
def _processor() -> str:
    """Describe the processor as far as compilers look at it."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((x for x in lines if x.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {processor_name()} {flags}"


def cache_folder() -> Path:
    """Name the folder in which libraries are kept, below XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "smat" / "native"


def cached_libraries() -> list[Path]:
    """List the libraries that were kept."""
    return sorted(cache_folder().glob("*.so"))


@contextmanager
def _cache_folder() -> Iterator[Path]:
    """Open the user's folder, or one that is gone after loading, if that one cannot be used.

    Others must not be able to write what this process runs.
    """
    folder = cache_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        usable = os.access(folder, os.W_OK) and status.st_uid == os.geteuid()
        usable = usable and not status.st_mode & 0o022
    except OSError:
        usable = False
    if usable:
        yield folder
        return
    _log.info("%s is not this user's to write: kernels are compiled for this process alone", folder)
    with tempfile.TemporaryDirectory(prefix="smat-native-") as own:
        yield Path(own)


def _find_or_compile(source: Path, folder: Path) -> Path:
    library = folder / library_name(source)
    if not _is_whole(library):
        with _locked(folder / f"{library.stem}.lock"):
            if not _is_whole(library):  # nobody else made it meanwhile
                _compile(source, library)
    return library


def _checksum(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    try:
        found = hashlib.sha256(library.read_bytes()).hexdigest()
        return found == _checksum(library).read_text()
    except (OSError, UnicodeDecodeError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds the lock; it falls with the process that holds it."""
    import fcntl  # which not every system has

    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(source: Path, library: Path) -> None:
    """Compile beside the library's place, and move the result there, its checksum last."""
    with tempfile.TemporaryDirectory(dir=library.parent) as work:
        made = Path(work) / library.name
        command = [*compile_command(), f"-I{HEADERS}", str(source), "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
        _checksum(made).write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        for each in (made, _checksum(made)):
            each.replace(library.parent / each.name)
