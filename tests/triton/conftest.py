"""Kernels run in Triton's interpreter, in a process of their own.

The interpreter must be switched on before Triton is imported, and other tests import it. So what is
in `interpreted/` is collected only with TRITON_INTERPRET=1 in the environment, as by

    TRITON_INTERPRET=1 python -m pytest tests/triton/interpreted

and `test_interpreted.py`, which is part of `make test`, runs each of its files so.
"""

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted/*"]
