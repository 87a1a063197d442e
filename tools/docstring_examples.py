"""Show the doctests of docstrings as code: an extension of griffe, which mkdocs.yml names."""

from __future__ import annotations

import re
from typing import Any

import griffe

# From a prompt at the beginning of a line to the next blank line.
DOCTEST = re.compile(r"^( *)>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class DocstringExamples(griffe.Extension):
    """Fence every doctest of every docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite a docstring before it is rendered."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(self.fence, obj.docstring.value)

    @staticmethod
    def fence(match: re.Match[str]) -> str:
        """Put a doctest between fences, indented as it is."""
        indent = match[1]
        return f"{indent}```pycon\n{match[0]}\n{indent}```"
