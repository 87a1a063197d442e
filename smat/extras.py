"""Name the optional extra to install when one of its packages is missing."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


class MissingExtraError(ImportError):
    """A feature was asked for whose optional packages are not installed."""


def missing_extra(package: str, extra: str) -> MissingExtraError:
    """Say in one line which extra brings a package.

    >>> print(missing_extra("matplotlib", "cli"))
    matplotlib is not installed; install it with: pip install "smat[cli]"
    """
    message = f'{package} is not installed; install it with: pip install "smat[{extra}]"'
    return MissingExtraError(message, name=package)


def require(module: str, extra: str) -> ModuleType:
    """Import a module that an extra brings, or raise an error that names the extra.

    >>> require("math", extra="cli").floor(2.5)
    2

    A module that is there but fails to import a package of its own keeps its own error.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise missing_extra(package, extra) from error


def called_later(module: str, name: str) -> Callable[..., Any]:
    """Stand in for a function whose module is imported when it is called, not before.

    >>> called_later("math", "floor")(2.5)
    2
    """

    def call(*arguments: Any, **options: Any) -> Any:
        return getattr(import_module(module), name)(*arguments, **options)

    return call
