"""Run a function on decoding states by itself: without autograd, autocast and compilers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def isolated(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Keep autograd, autocast and compilers away from the tables of a state.

    >>> @isolated
    ... def double(x):
    ...     return 2 * x
    >>> double(torch.ones(1, requires_grad=True)).requires_grad
    False

    A compiled model calls a step as it stands, between two graphs: what a compiler would make of
    writing into one state while another shares its memory never comes up.
    """

    @wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with torch.no_grad():
            device = next((x.device.type for x in args if isinstance(x, Tensor)), "cpu")
            if not torch.is_autocast_enabled(device):
                return function(*args, **kwargs)
            with torch.autocast(device, enabled=False):
                return function(*args, **kwargs)

    @wraps(function)
    def enter(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling():
            return run(*args, **kwargs)
        # Only here, since it loads the compiler, which `import smat` must not.
        uncompiled: Callable[Arguments, Result] = torch.compiler.disable(run)
        return uncompiled(*args, **kwargs)

    return enter
