"""What the command line says on the side: warnings as one line each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
