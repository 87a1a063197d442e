"""The options of the `smat bench` commands, their presets and their examples."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

# What `--preset` fills in where an option is not given.
PRESETS: dict[str, dict[str, Any]] = {
    "quick": {"seq_len": [1024, 2048, 4096], "repeats": 3},
    "paper-figure": {"seq_len": [16384, 32768, 65536, 98304, 131072]},
    "gates": {"seq_len": [65536], "both": True, "against": "none"},
    "window": {"seq_len": [32768], "window_step": [2048], "against": "none"},
}

TABULATE_EXAMPLES = """Examples:

  smat bench tabulate

  smat bench tabulate --case 17,4 --case 23,4 --repeats 9

  smat bench tabulate --case 5,3 --columns 64 --no-memory
"""

ATTENTION_EXAMPLES = """Examples:

  smat bench {name} --preset paper-figure

  smat bench {name} --seq-len 65536 --vc-dim 3 --both --against none

  smat bench {name} --seq-len 32768 --vc-dim 3 --window-step 2048

  smat bench {name} --seq-len 65536 --softmax-heads 1 --repeats 9

Presets, which fill in options that are not given:

  quick: T from 1K to 4K, 3 runs

  paper-figure: T from 16K to 128K

  gates: T = 64K, with gates and without, no softmax

  window: T = 32K, fixed boundary and a window of 2048, no softmax
"""

DECODE_EXAMPLES = """Examples:

  smat bench decode

  smat bench decode --context 1024 --context 65536 --vc-dim 3 --batch 1

  smat bench decode --schedule window --window-step 4096 --no-softmax
"""


LAYERS_EXAMPLES = """Examples:

  smat bench layers

  smat bench layers --seq-len 16384 --vc-dim 2 --repeats 5
"""


class Preset(str, Enum):
    """Names that `--preset` takes."""

    quick = "quick"
    paper_figure = "paper-figure"
    gates = "gates"
    window = "window"


class Against(str, Enum):
    """What `--against` takes."""

    sdpa = "sdpa"
    none = "none"


class Kind(str, Enum):
    """What `--schedule` takes."""

    fixed = "fixed"
    window = "window"


class Dtype(str, Enum):
    """What `--dtype` takes."""

    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


SeqLens = Annotated[
    list[int] | None, typer.Option(help="Sequence length T; may be repeated (4096, 16384).")
]
VcDims = Annotated[list[int] | None, typer.Option(help="VC dimension d; may be repeated (1 to 4).")]
Heads = Annotated[int, typer.Option(help="Heads.")]
KeyDim = Annotated[int, typer.Option(help="Width of queries and keys.")]
ValueDim = Annotated[int, typer.Option(help="Width of values.")]
Batch = Annotated[int, typer.Option(help="Sequences at once.")]
ChunkSize = Annotated[int, typer.Option(help="Chunk width c of the mask.")]
Gated = Annotated[bool, typer.Option("--gated", help="Time the op with decay gates.")]
Both = Annotated[bool | None, typer.Option("--both", help="Time it with gates and without.")]
Windows = Annotated[
    list[int] | None,
    typer.Option(help="Also time a window that steps by so many tokens; may be repeated."),
]
Schedules = Annotated[
    list[Kind] | None,
    typer.Option(help="Boundary: fixed, or window with --window-step (T/16); may be repeated."),
]
AgainstOption = Annotated[Against | None, typer.Option(help="What to time beside it (sdpa).")]
SoftmaxUpTo = Annotated[int, typer.Option(help="Longest T at which softmax is timed.")]
SoftmaxHeads = Annotated[
    int | None, typer.Option(help="Compare with softmax on fewer heads, the same for both.")
]
Repeats = Annotated[int | None, typer.Option(help="Runs of each candidate (5).")]
Budget = Annotated[
    float, typer.Option(help="Seconds after which a candidate leaves, with 3 runs or more.")
]
Memory = Annotated[
    bool, typer.Option("--memory/--no-memory", help="Measure peak memory in fresh processes.")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Type of the inputs.")]
Device = Annotated[str, typer.Option(help="Device, for example cpu or cuda.")]
PresetOption = Annotated[Preset | None, typer.Option(help="A named choice of options.")]
JsonOut = Annotated[Path | None, typer.Option(help="Result to write, JSON (out/bench_*.json).")]
FigureOut = Annotated[Path | None, typer.Option(help="Figure to write (out/bench_*.png).")]
