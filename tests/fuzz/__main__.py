"""The command: `python -m tests.fuzz --seconds 120`, which `make fuzz` runs."""

import argparse
import sys
from pathlib import Path

from tests.fuzz.runner import run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="stop after so many seconds")
    parser.add_argument("--count", type=int, help="stop after so many cases")
    parser.add_argument(
        "--from", dest="first", default="0", help="the first seed, or `last`: after the noted one"
    )
    parser.add_argument("--note", type=Path, default=Path("out/fuzz-seed"), help="the last seed")
    given = parser.parse_args(arguments)
    if given.seconds is None and given.count is None:
        parser.error("give --seconds, --count or both")
    given.note.parent.mkdir(parents=True, exist_ok=True)
    noted = given.note.read_text() if given.first == "last" and given.note.exists() else "-1"
    first = int(noted) + 1 if given.first == "last" else int(given.first)
    report = run(first, given.seconds, given.count, given.note, say=lambda x: print(x, flush=True))
    print(f"seeds from {first}, the last is in {given.note}: --from last goes on behind it")
    print(report)
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main())
