"""The command line: read arguments, call the library, print."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console

from smat import schedules
from smat.bench.cli import app as bench_app
from smat.data.cli import app as data_app
from smat.experiments.cli import app as experiments_app
from smat.experiments.cli import examples
from smat.machine import num_cores, processor_name
from smat.masks.boundary import BoundarySchedule
from smat.masks.mask import SMatMask, SMatWarning
from smat.ops.backend import available_backends
from smat.ops.native import build
from smat.report.figures import mask_figure, save_figure
from smat.report.terminal_tables import geometry_row, rows_table

app = typer.Typer(
    help="SMat-Attention: causal masks of a chosen VC dimension, in linear time.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # smat.__main__ turns an error into one line
)
TABLE_WIDTH = 200  # a table takes what it needs, and no number is ever cut to fit a terminal
Schedule = Literal["rebuilt", "kept", "none", "doubling", "window"]


@app.command(
    epilog=examples(
        "smat mask --seq-len 64 --vc-dim 3 --out mask.png",
        "smat mask --seq-len 128 --vc-dim 2 --vc-dim 3 --vc-dim 4 --out masks.png",
        "smat mask --seq-len 96 --boundary window --window-step 16 --out window.svg",
    )
)
def mask(
    seq_len: Annotated[int, typer.Option(help="Sequence length T.")] = 64,
    vc_dim: Annotated[
        list[int] | None,
        typer.Option(help="VC dimension d; give it several times for panels side by side (3)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Picture to write: .png, .svg or .pdf.")] = Path(
        "mask.png"
    ),
    chunk_size: Annotated[
        int | None,
        typer.Option(help="Chunk width c (the largest power of two up to T/8 and 64)."),
    ] = None,
    field_size: Annotated[
        int | None, typer.Option(help="Prime q (the smallest with q^d >= n).")
    ] = None,
    boundary: Annotated[
        Schedule, typer.Option(help="Where the distant keys end, as a function of the query.")
    ] = "rebuilt",
    num_distant: Annotated[
        int | None, typer.Option(help="Distant keys n, for --boundary kept.")
    ] = None,
    window_step: Annotated[
        int | None, typer.Option(help="Step of the window, for --boundary window (T/4).")
    ] = None,
) -> None:
    """Draw masks: causal entries, long-range entries by hyperplane, and zeros."""
    if chunk_size is None:  # at least four chunks on each side of the boundary
        chunk_size = 2 ** min(6, max(0, (seq_len // 8).bit_length() - 1))
    schedule = _schedule(boundary, seq_len, num_distant, window_step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SMatWarning)  # said below, mask by mask
        masks = [
            SMatMask(seq_len, d, chunk_size=chunk_size, field_size=field_size, boundary=schedule)
            for d in vc_dim or [3]
        ]
    path = save_figure(mask_figure(masks), out)
    for drawn in masks:
        note = "" if drawn.guarantees_vc_dim else f"; VC = {drawn.vc_dim} is not guaranteed"
        typer.echo(f"{drawn.describe()}{note}")
    typer.echo(f"Drawn into {path}")


@app.command(
    epilog=examples(
        "smat geometry --seq-len 65536",
        "smat geometry --seq-len 262144 --vc-dim 3 --heads 8 --key-dim 64 --dtype bf16",
        "smat geometry --seq-len 1024 --json",
    )
)
def geometry(
    seq_len: Annotated[int, typer.Option(help="Sequence length T.")] = 65536,
    vc_dim: Annotated[
        list[int] | None, typer.Option(help="VC dimension d; may be repeated (1 to 4).")
    ] = None,
    chunk_size: Annotated[int, typer.Option(help="Chunk width c.")] = 64,
    heads: Annotated[int, typer.Option(help="Heads that keep a cache.")] = 1,
    key_dim: Annotated[int, typer.Option(help="Feature dimension r of queries and keys.")] = 32,
    value_dim: Annotated[
        int, typer.Option(help="Value dimension; a state has one more column, p = value_dim + 1.")
    ] = 32,
    batch: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 1,
    dtype: Annotated[
        Literal["fp64", "fp32", "bf16", "fp16"], typer.Option(help="Type of the cached states.")
    ] = "fp32",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table.")
    ] = False,
) -> None:
    """Print sizes, tabulation cost and decode cache for each VC dimension."""
    cache: dict[str, Any] = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    cache |= {"batch": batch, "dtype": dtype}
    rows = [geometry_row(seq_len, d, chunk_size, **cache) for d in vc_dim or [1, 2, 3, 4]]
    if as_json:
        shape = {"seq_len": seq_len, "chunk_size": chunk_size, **cache}
        typer.echo(json.dumps({**shape, "rows": rows}, indent=2))
        return
    console = Console(width=TABLE_WIDTH, highlight=False)
    title = f"T = {seq_len}, c = {chunk_size}, r = {key_dim}, p = {value_dim + 1}"
    console.print(rows_table(title, rows))
    console.print(
        f"Additions: of states of {key_dim} x {value_dim + 1} numbers, to tabulate once, "
        f"for one head of one sequence.\n"
        f"Cache: the B + 1 states that decoding keeps, for {heads} head{'s' * (heads > 1)}, "
        f"batch {batch}, {dtype} (1 MB = 10^6 bytes).\n"
        f"VC = d: yes where the proof applies, for d > 1 that is P <= n and 2B <= m."
    )


@app.command(epilog=examples("smat info"))
def info() -> None:
    """Print which backends run here, and how native kernels are compiled and kept."""
    rows = {
        "processor": f"{processor_name()}, {num_cores()} cores",
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "backends on cpu": ", ".join(available_backends("cpu")),
        "native kernels": build.why_not() or "compiled on first use",
        "compiler": " ".join(build.find_compiler()) or "none",
        "flags": " ".join(build.compile_command()[len(build.find_compiler()) :]),
        "cache": f"{build.cache_folder()}, {len(build.cached_libraries())} libraries",
    }
    for name, text in rows.items():
        typer.echo(f"{name + ':':18}{text}")


def _schedule(
    boundary: Schedule, seq_len: int, num_distant: int | None, window_step: int | None
) -> BoundarySchedule:
    if num_distant is not None and boundary != "kept":
        raise ValueError(f"--num-distant {num_distant} needs --boundary kept, not {boundary}")
    if window_step is not None and boundary != "window":
        raise ValueError(f"--window-step {window_step} needs --boundary window, not {boundary}")
    if boundary == "kept":
        if num_distant is None:
            raise ValueError("--boundary kept needs --num-distant, the number of distant keys")
        return schedules.kept(num_distant)
    if boundary == "window":
        return schedules.window(max(1, seq_len // 4) if window_step is None else window_step)
    simple = {"rebuilt": schedules.rebuilt, "doubling": schedules.doubling, "none": schedules.none}
    return simple[boundary]()


app.add_typer(bench_app, name="bench")
app.add_typer(data_app, name="data")
app.add_typer(experiments_app)  # not below a name
