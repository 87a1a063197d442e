"""One place picks the implementation."""

from __future__ import annotations

from torch import Tensor

BACKENDS = ("torch",)


def available_backends(device_type: str = "cpu") -> tuple[str, ...]:
    """List the implementations that run on a device, the preferred one first.

    >>> available_backends("cpu")
    ('torch',)
    """
    return BACKENDS


def choose_backend(backend: str, q: Tensor) -> str:
    """Resolve "auto" to the best implementation for the inputs; a forced one must be there."""
    available = available_backends(q.device.type)
    if backend == "auto":
        return available[0]
    if backend not in available:
        raise ValueError(
            f"backend must be 'auto' or one of {', '.join(available)} on {q.device.type}, "
            f"got {backend!r}"
        )
    return backend
