"""Let the tests, and the processes that they start, import the tiny task and its table."""

import sys
from pathlib import Path

HERE = str(Path(__file__).parents[1] / "experiments")
if HERE not in sys.path:
    sys.path.insert(0, HERE)
