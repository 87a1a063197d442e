"""The command line: read arguments, call the library, print."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from smat.masks import boundary as schedules
from smat.masks.boundary import BoundarySchedule
from smat.masks.mask import SMatMask, SMatWarning
from smat.report.figures import mask_figure, save_figure
from smat.report.geometry_table import CacheShape, GeometryRow, format_bytes, geometry_row

app = typer.Typer(
    help="SMat-Attention: causal masks of a chosen VC dimension, in linear time.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # smat.__main__ turns an error into one line
)

TABLE_WIDTH = 200  # a table takes what it needs, and no number is ever cut to fit a terminal

MASK_EXAMPLES = """Examples:

  smat mask --seq-len 64 --vc-dim 3 --out mask.png

  smat mask --seq-len 128 --vc-dim 2 --vc-dim 3 --vc-dim 4 --out masks.png

  smat mask --seq-len 96 --boundary window --window-step 16 --out window.svg
"""

GEOMETRY_EXAMPLES = """Examples:

  smat geometry --seq-len 65536

  smat geometry --seq-len 262144 --vc-dim 3 --heads 8 --key-dim 64 --dtype bf16

  smat geometry --seq-len 1024 --json
"""


class Schedule(str, Enum):
    """The boundary schedules, by the names that `--boundary` takes."""

    rebuilt = "rebuilt"
    kept = "kept"
    none = "none"
    doubling = "doubling"
    window = "window"


class Dtype(str, Enum):
    """Floating-point types, by the names that `--dtype` takes."""

    fp64 = "fp64"
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


@app.callback()
def root() -> None:
    """SMat-Attention: causal masks of a chosen VC dimension, in linear time."""


@app.command(epilog=MASK_EXAMPLES)
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
    ] = Schedule.rebuilt,
    num_distant: Annotated[
        int | None, typer.Option(help="Distant keys n, for --boundary kept.")
    ] = None,
    window_step: Annotated[
        int | None, typer.Option(help="Step of the window, for --boundary window (T/4).")
    ] = None,
) -> None:
    """Draw masks: causal entries, long-range entries by hyperplane, and zeros."""
    chunk_size = _chunk_size_to_draw(seq_len) if chunk_size is None else chunk_size
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


@app.command(epilog=GEOMETRY_EXAMPLES)
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
    dtype: Annotated[Dtype, typer.Option(help="Type of the cached states.")] = Dtype.fp32,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table.")
    ] = False,
) -> None:
    """Print sizes, tabulation cost and decode cache for each VC dimension."""
    cache = CacheShape(heads, key_dim, value_dim, batch, dtype.value)
    rows = [geometry_row(seq_len, d, cache, chunk_size) for d in vc_dim or [1, 2, 3, 4]]
    if as_json:
        shape = {"seq_len": seq_len, "chunk_size": chunk_size, **asdict(cache)}
        typer.echo(json.dumps({**shape, "rows": [asdict(row) for row in rows]}, indent=2))
        return
    console = Console(width=TABLE_WIDTH, highlight=False)
    console.print(_geometry_table(seq_len, chunk_size, cache, rows))
    console.print(
        f"Additions: of states of {key_dim} x {value_dim + 1} numbers, to tabulate once, "
        f"for one head of one sequence.\n"
        f"Cache: the B + 1 states that decoding keeps, for {heads} head{'s' * (heads > 1)}, "
        f"batch {batch}, {dtype.value} (1 MB = 10^6 bytes).\n"
        f"VC = d: yes where the proof applies, for d > 1 that is P <= n and 2B <= m."
    )


def _geometry_table(
    seq_len: int, chunk_size: int, cache: CacheShape, rows: list[GeometryRow]
) -> Table:
    title = f"T = {seq_len}, c = {chunk_size}, r = {cache.key_dim}, p = {cache.value_dim + 1}"
    table = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("d", "q", "P", "B", "n", "m", "VC = d"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("additions,\nAlgorithm 2", "additions,\nfactored", "cache,\nstates", "cache"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            *(
                f"{number:,}"
                for number in (
                    row.vc_dim,
                    row.field_size,
                    row.num_profiles,
                    row.num_types,
                    row.num_distant,
                    row.num_recent,
                )
            ),
            "yes" if row.guarantees_vc_dim else "no",
            f"{row.additions_algorithm2:,}",
            f"{row.additions_factored:,}",
            f"{row.cache_states:,}",
            format_bytes(row.cache_bytes),
        )
    return table


def _chunk_size_to_draw(seq_len: int) -> int:
    """Pick chunks small enough for a picture: at least four on each side of the boundary."""
    return 2 ** min(6, max(0, (seq_len // 8).bit_length() - 1))


def _schedule(
    kind: Schedule, seq_len: int, num_distant: int | None, window_step: int | None
) -> BoundarySchedule | None:
    if num_distant is not None and kind is not Schedule.kept:
        raise ValueError(f"--num-distant {num_distant} needs --boundary kept, not {kind.value}")
    if window_step is not None and kind is not Schedule.window:
        raise ValueError(f"--window-step {window_step} needs --boundary window, not {kind.value}")
    if kind is Schedule.kept:
        if num_distant is None:
            raise ValueError("--boundary kept needs --num-distant, the number of distant keys")
        return schedules.kept(num_distant)
    if kind is Schedule.window:
        return schedules.window(max(1, seq_len // 4) if window_step is None else window_step)
    if kind is Schedule.doubling:
        return schedules.doubling()
    return schedules.none() if kind is Schedule.none else schedules.rebuilt()


def _mount_sub_apps() -> None:
    """Add the commands of other rooms: each keeps them as `app` in a module named `cli`."""
    for room, name in (("bench", "bench"), ("experiments", None)):  # None: not below a name
        if find_spec(f"smat.{room}") is not None and find_spec(f"smat.{room}.cli") is not None:
            app.add_typer(import_module(f"smat.{room}.cli").app, name=name)


_mount_sub_apps()
