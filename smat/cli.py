"""The command line: read arguments, call the library, print."""

from __future__ import annotations

import json
import warnings
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from smat import __version__
from smat.bench.cli import app as bench_app
from smat.console import table_console
from smat.data.cli import app as data_app
from smat.experiments.cli import app as experiments_app
from smat.experiments.cli import examples

if TYPE_CHECKING:  # torch, which help texts do without
    from smat.masks.boundary import BoundarySchedule
    from smat.masks.mask import SMatMask

app = typer.Typer(
    help="SMat-Attention: causal masks of a chosen VC dimension, in linear time.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,  # smat.__main__ turns an error into one line
)
DRAWN_LENGTHS = [2**power for power in range(6, 12)]
Dtype = Literal["fp64", "fp32", "bf16", "fp16"]


class Schedule(str, Enum):
    """Where the distant keys end, by name."""

    REBUILT = "rebuilt"
    KEPT = "kept"
    NONE = "none"
    DOUBLING = "doubling"
    WINDOW = "window"


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"smat {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


@app.command(
    epilog=examples(
        "smat mask --vc-dim 4",
        "smat mask --seq-len 64 --vc-dim 3 --out mask.png",
        "smat mask --seq-len 128 --vc-dim 2 --vc-dim 3 --vc-dim 4 --out masks.png",
        "smat mask --seq-len 96 --boundary rebuilt --boundary window --window-step 16",
    )
)
def mask(
    seq_len: Annotated[
        int | None,
        typer.Option(help="Sequence length T (the shortest power of two with VC = d guaranteed)."),
    ] = None,
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
        list[Schedule] | None,
        typer.Option(help="Where the distant keys end; may be repeated (rebuilt)."),
    ] = None,
    num_distant: Annotated[
        int | None, typer.Option(help="Distant keys n, for --boundary kept.")
    ] = None,
    window_step: Annotated[
        int | None, typer.Option(help="Step of the window, for --boundary window (T/4).")
    ] = None,
) -> None:
    """Draw masks: causal entries, long-range entries by hyperplane, and zeros."""
    from smat.report.figures import mask_figure, save_figure

    names = [each.value for each in boundary or [Schedule.REBUILT]]
    for option, given, needed in (
        ("--num-distant", num_distant, "kept"),
        ("--window-step", window_step, "window"),
    ):
        if given is not None and needed not in names:
            raise ValueError(f"{option} {given} needs --boundary {needed}, not {', '.join(names)}")

    def make(length: int) -> list[SMatMask]:
        schedules = [_schedule(name, length, num_distant, window_step) for name in names]
        return [
            _mask(length, d, chunk_size, field_size, schedule)
            for d in vc_dim or [3]
            for schedule in schedules
        ]

    if seq_len is None:
        drawn = (make(length) for length in DRAWN_LENGTHS)
        masks = next(
            (each for each in drawn if all(m.guarantees_vc_dim and m.num_distant for m in each)),
            None,
        ) or make(DRAWN_LENGTHS[1])
    else:
        masks = make(seq_len)
    path = save_figure(mask_figure(masks), out)
    for mask in masks:
        note = "" if mask.guarantees_vc_dim else f"; VC = {mask.vc_dim} is not guaranteed"
        typer.echo(f"{mask.describe()}{note}")
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
    dtype: Annotated[Dtype, typer.Option(help="Type of the cached states.")] = "fp32",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON in place of a table.")
    ] = False,
) -> None:
    """Print sizes, tabulation cost and decode cache for each VC dimension."""
    from smat.report.terminal_tables import geometry_row, rows_tables

    cache: dict[str, Any] = {"heads": heads, "key_dim": key_dim, "value_dim": value_dim}
    cache |= {"batch": batch, "dtype": dtype}
    rows = [geometry_row(seq_len, d, chunk_size, **cache) for d in vc_dim or [1, 2, 3, 4]]
    if as_json:
        shape = {"seq_len": seq_len, "chunk_size": chunk_size, **cache}
        typer.echo(json.dumps({**shape, "rows": rows}, indent=2))
        return
    console = table_console()
    title = f"T = {seq_len}, c = {chunk_size}, r = {key_dim}, p = {value_dim + 1}"
    console.print(*rows_tables(title, rows))
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
    import torch

    from smat.machine import num_cores, processor_name
    from smat.ops.backend import available_backends
    from smat.ops.native import build

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


@app.command(
    epilog=examples(
        "smat recommend --seq-len 65536",
        "smat recommend --seq-len 262144 --heads 16 --key-dim 128 --value-dim 128 --memory 2GB",
    )
)
def recommend(
    seq_len: Annotated[int, typer.Option(help="Sequence length T.")],
    heads: Annotated[int, typer.Option(help="Heads of a layer.")] = 8,
    key_dim: Annotated[int, typer.Option(help="Feature dimension of queries and keys.")] = 64,
    value_dim: Annotated[int, typer.Option(help="Value dimension.")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences decoded at once.")] = 1,
    dtype: Annotated[Dtype, typer.Option(help="Type of the cached states.")] = "fp32",
    memory: Annotated[
        str | None,
        typer.Option(help="Largest cache of a layer, as 500MB (that of softmax)."),
    ] = None,
    max_work: Annotated[
        float, typer.Option(help="Work to accept, relative to linear attention.")
    ] = 2.0,
    max_vc_dim: Annotated[int, typer.Option(min=1, help="Largest d to look at.")] = 4,
) -> None:
    """Say which d, boundary and step suit a length, what they cost, and where softmax is faster."""
    from smat.report import advice
    from smat.report.terminal_tables import rows_tables

    shape: dict[str, Any] = {"heads": heads, "batch": batch, "dtype": dtype}
    rows = advice.advise(seq_len, max_vc_dim, key_dim=key_dim, value_dim=value_dim, **shape)
    keys_and_values = advice.softmax_cache(seq_len, width=key_dim + value_dim, **shape)
    limit = keys_and_values if memory is None else advice.parse_bytes(memory)
    chosen = advice.choose(rows, limit, max_work)
    title = f"T = {seq_len}, {heads} heads, r = {key_dim}, p = {value_dim + 1}, batch {batch}"
    table_console().print(*rows_tables(f"{title}, {dtype}, one layer", rows))
    for paragraph in advice.reasons(seq_len, chosen, keys_and_values):
        typer.echo(f"\n{advice.wrap(paragraph)}")


@app.command(epilog=examples("smat ranks", "smat ranks --seq-len 10000000 --ranks 64"))
def ranks(
    seq_len: Annotated[
        list[int] | None, typer.Option(help="Tokens of all ranks (10^6, 10^7, 10^8).")
    ] = None,
    ranks: Annotated[
        list[int] | None, typer.Option(help="Devices that hold a sequence together (8, 1024).")
    ] = None,
    heads: Annotated[int, typer.Option(help="Heads on a device.")] = 16,
    key_dim: Annotated[int, typer.Option(help="Width of queries and keys.")] = 64,
    value_dim: Annotated[int, typer.Option(help="Width of values.")] = 64,
    layers: Annotated[int, typer.Option(help="Layers, whose inputs are kept.")] = 24,
    memory: Annotated[float, typer.Option(help="GB of a device.")] = 80.0,
) -> None:
    """Print, on paper, what ranks that hold a sequence together send, and how long it may be."""
    from smat.report.rank_costs import RankCosts, longest_rows, sent_rows
    from smat.report.terminal_tables import rows_tables

    costs = RankCosts(heads, key_dim, value_dim, layers, 1e9 * memory)
    counts, lengths = ranks or [8, 1024], seq_len or [10**6, 10**7, 10**8]
    title, rows = "Sent by a rank, in a layer, both ways", sent_rows(costs, lengths, counts)
    table_console().print(*rows_tables(title, rows, "seq_len"))
    title = f"The longest sequence in {memory:g} GB a device"
    table_console().print(*rows_tables(title, longest_rows(costs, counts), "ranks"))


def _mask(
    seq_len: int,
    vc_dim: int,
    chunk_size: int | None,
    field_size: int | None,
    schedule: BoundarySchedule,
) -> SMatMask:
    """Make a mask to draw, by default with at least four chunks on each side of the boundary."""
    from smat.masks.mask import SMatMask, SMatWarning

    if chunk_size is None:
        chunk_size = 2 ** min(6, max(0, (seq_len // 8).bit_length() - 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SMatWarning)  # the command says so, mask by mask
        return SMatMask(seq_len, vc_dim, chunk_size, field_size, boundary=schedule)


def _schedule(
    boundary: str, seq_len: int, num_distant: int | None, window_step: int | None
) -> BoundarySchedule:
    from smat import schedules

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
