"""How the command line speaks: tables of at most 100 columns, warnings as one line each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100  # columns that every table fits into, whatever the terminal


def table_console() -> Console:
    """Make the console for tables, in which no text is obeyed as markup."""
    from rich.console import Console

    return Console(width=WIDTH, highlight=False, markup=False)


@contextmanager
def one_line_warnings() -> Iterator[None]:
    """Print warnings as one line without the place in the source; errors and filters stay.

    >>> import contextlib, io
    >>> with contextlib.redirect_stderr(io.StringIO()) as printed, one_line_warnings():
    ...     warnings.simplefilter("always")
    ...     warnings.warn("short of disk")
    >>> printed.getvalue()
    'smat: warning: short of disk\\n'
    """

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"smat: warning: {' '.join(str(message).split())}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
