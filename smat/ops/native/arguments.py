"""Tensors as native kernels take them, and how many threads a call is worth."""

from __future__ import annotations

import ctypes
import os

import torch
from torch import Tensor

THREAD_WORK = 1 << 22  # multiplications that are worth starting a thread for


class Array(ctypes.Structure):
    """A tensor (B, T, heads, width) or (B, T, heads): its address and its strides.

    >>> array(torch.zeros(2, 3, 4, 5)).token
    20

    The caller keeps the tensor alive.
    """

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", ctypes.c_int64),
        ("token", ctypes.c_int64),
        ("head", ctypes.c_int64),
    )


def array(x: Tensor | None) -> Array:
    """Describe a tensor whose rows lie without gaps; None is an address of 0."""
    if x is None:
        return Array()
    assert x.ndim == 3 or x.stride(-1) == 1 or x.shape[-1] <= 1, "rows with gaps"
    return Array(x.data_ptr(), *x.stride()[:3])


def along_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor, and lay its last dimension out without gaps."""
    x = x.to(dtype)
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def num_threads(work: int) -> int:
    """Choose how many threads so many multiplications are worth, at most as many as torch has.

    The threads are torch's own, and none of them survives a fork.
    """
    return max(1, min(torch.get_num_threads(), work // THREAD_WORK, _most_threads))


def _stay_alone() -> None:
    global _most_threads
    _most_threads = 1


_most_threads = 1 << 30
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stay_alone)
