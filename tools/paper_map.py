"""Keep the line numbers of the map of the paper, a page of the documentation, right.

python tools/paper_map.py          # write them anew
python tools/paper_map.py --check  # 1 if one is wrong
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "paper.md"
ENTRY = re.compile(r"`([\w/.]+\.py):(\d+)` `(\w+)`")


def find_line(path: str, name: str) -> int:
    """Find the line that defines a function or class."""
    lines = (ROOT / path).read_text().splitlines()
    pattern = re.compile(rf"\s*(?:def|class) {name}\b")
    return next(number for number, line in enumerate(lines, 1) if pattern.match(line))


def refresh(text: str) -> str:
    """Write the right line into every entry."""
    return ENTRY.sub(lambda m: f"`{m[1]}:{find_line(m[1], m[3])}` `{m[3]}`", text)


def main() -> int:
    """Check the map, or write it anew."""
    text = GUIDE.read_text()
    right = refresh(text)
    if "--check" in sys.argv:
        return int(text != right)
    GUIDE.write_text(right)
    return 0


if __name__ == "__main__":
    sys.exit(main())
