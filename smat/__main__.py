"""Run the command line, and turn what goes wrong into one line: `smat` or `python -m smat`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from smat.console import one_line_warnings
from smat.extras import missing_extra

CLI_PACKAGES = {"pydantic", "typer", "rich"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 for an error, 2 for wrong usage."""
    try:
        from smat.cli import app
    except ModuleNotFoundError as error:
        if error.name not in CLI_PACKAGES:
            raise
        return _fail(missing_extra(error.name, "cli"))
    try:
        with one_line_warnings():
            app(args=arguments, prog_name="smat")
    except (ValueError, ImportError, OSError) as error:
        return _fail(error)
    except SystemExit as end:  # how typer ends a command, successful or not
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _fail(error: Exception) -> int:
    print(f"smat: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
