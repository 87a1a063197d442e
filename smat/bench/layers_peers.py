"""The plain-torch recurrences of transformers, called as ours are; None where it is missing."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor


def _scan(scan: Callable[..., Any], chunk: int) -> Callable[..., Tensor]:
    def run(x: Tensor, step: Tensor, rate: Tensor, b: Tensor, c: Tensor) -> Tensor:
        out = scan(x, step, rate, b, c, chunk)
        return out[0] if isinstance(out, tuple) else out

    return run


def _delta_rule(rule: Callable[..., Any], chunk: int) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor) -> Tensor:
        return rule(q, k, v, g=log_decay, beta=beta, chunk_size=chunk)[0]

    return run


MAMBA2, GATED_DELTANET = (
    ("transformers.models.mamba2.modeling_mamba2", "mamba2_chunk_scan", _scan),
    (
        "transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule",
        _delta_rule,
    ),
)  # fmt: skip
Source = tuple[str, str, Callable[[Callable[..., Any], int], Callable[..., Tensor]]]
# By the name it is printed with: what it is, and its chunk. Its own default comes first.
PEERS: dict[str, tuple[Source, int]] = {
    "transformers mamba2_chunk_scan, chunk 256": (MAMBA2, 256),
    "transformers mamba2_chunk_scan, chunk 64": (MAMBA2, 64),
    "transformers torch_chunk_gated_delta_rule, chunk 64": (GATED_DELTANET, 64),
}


def load_peer(name: str) -> Callable[..., Tensor] | None:
    """Import a peer, without the wrapper that would look for a kernel; None if it is not there."""
    (module, function, adapt), chunk = PEERS[name]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError):
        return None
    return adapt(inspect.unwrap(found), chunk)
