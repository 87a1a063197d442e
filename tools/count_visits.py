"""Count the files, functions and switches between files that a call goes through.

    python tools/count_visits.py

Each call is made once before it is counted, so that what is cached is not counted again.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

import smat
from smat.layers import Mamba2, ProfileMemory

PACKAGE = str(Path(smat.__file__).parent)


class Visits(NamedTuple):
    """What a call went through."""

    files: set[str]
    functions: set[tuple[str, str, int]]
    switches: int


def count_visits(call: Callable[[], Any]) -> Visits:
    """Run a call and note every function of the package that it enters."""
    functions: set[tuple[str, str, int]] = set()
    order: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            functions.add((name, frame.f_code.co_name, frame.f_code.co_firstlineno))
            order.append(name)

    call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    switches = sum(one != other for one, other in itertools.pairwise(order))
    return Visits({name for name, *_ in functions}, functions, switches)


def calls() -> dict[str, tuple[Callable[[], Any], int]]:
    """Name the calls of the table, and how many files each may visit."""
    torch.manual_seed(0)
    mask = smat.SMatMask(seq_len=512, vc_dim=3)
    q, k, v = torch.randn(3, 1, 512, 2, 16)
    needs = [x.clone().requires_grad_() for x in (q, k, v)]
    out, _ = smat.smat_attention(*needs, mask)
    _, state = smat.smat_attention(q, k, v, mask, output_final_state=True)
    token = q[:, 0], k[:, 0], v[:, 0]
    kept = smat.SMatMask(512, 3, field_size=7, boundary=smat.schedules.kept(256))
    layer = Mamba2(32, head_dim=16, state_dim=16, memory=ProfileMemory(32, 4, kept))
    x = torch.randn(1, 512, 32)
    return {
        "smat_attention, forward": (lambda: smat.smat_attention(q, k, v, mask), 12),
        "smat_attention, backward": (
            lambda: torch.autograd.grad(out.sum(), needs, retain_graph=True), 10,
        ),
        "state.step": (lambda: state.step(*token), 8),
        "Mamba-2 with a memory": (lambda: layer(x), 25),
        "the same, with a cache": (lambda: layer(x, use_cache=True), 32),
    }  # fmt: skip


def main() -> int:
    """Print the table; 1 if a call visits more files than it may."""
    warnings.simplefilter("ignore")
    print(f"{'call':36}{'files':>6}{'limit':>6}{'functions':>10}{'switches':>9}")
    too_many = 0
    for name, (call, limit) in calls().items():
        visits = count_visits(call)
        too_many += len(visits.files) > limit
        row = (len(visits.files), limit, len(visits.functions), visits.switches)
        print(f"{name:36}{row[0]:6}{row[1]:6}{row[2]:10}{row[3]:9}")
        if "--files" in sys.argv:
            print(
                "   ", *sorted(Path(each).relative_to(PACKAGE).as_posix() for each in visits.files)
            )
    return int(too_many > 0)


if __name__ == "__main__":
    sys.exit(main())
