"""The `smat bench` commands: run a benchmark, print tables, write JSON and a figure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from smat.bench.attention import run_attention
from smat.bench.attention_config import AttentionConfig
from smat.bench.decode import run_decode
from smat.bench.decode_config import DecodeConfig
from smat.bench.layers import LayersConfig, run_layers
from smat.bench.options import (
    ATTENTION_EXAMPLES,
    DECODE_EXAMPLES,
    LAYERS_EXAMPLES,
    PRESETS,
    TABULATE_EXAMPLES,
    Against,
    AgainstOption,
    Batch,
    Both,
    Budget,
    ChunkSize,
    Device,
    Dtype,
    DtypeOption,
    FigureOut,
    Gated,
    Heads,
    JsonOut,
    KeyDim,
    Kind,
    Memory,
    Preset,
    PresetOption,
    Repeats,
    Schedules,
    SeqLens,
    SoftmaxHeads,
    SoftmaxUpTo,
    ValueDim,
    VcDims,
    Windows,
)
from smat.bench.progress import progress_bar
from smat.bench.tabulate import DEFAULT_CASES, TabulateConfig, run_tabulate
from smat.report import bench_table
from smat.report.figures import bench_figure, save_figure

app = typer.Typer(
    help="Time the library: everything is checked first, and compared within one process.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

TABLE_WIDTH = 240  # a table takes what it needs, and no number is ever cut to fit a terminal
OUT = Path("out")


@app.command(epilog=TABULATE_EXAMPLES)
def tabulate(
    case: Annotated[
        list[str] | None, typer.Option(help="Field size and VC dimension, as 17,4; repeatable.")
    ] = None,
    columns: Annotated[int, typer.Option(help="Columns of the table.")] = 2080,
    repeats: Repeats = None,
    budget: Budget = 30.0,
    dense_limit: Annotated[
        float, typer.Option(help="MB of an incidence matrix above which dense is left out.")
    ] = 700.0,
    memory: Memory = True,
    device: Device = "cpu",
    json_out: JsonOut = None,
) -> None:
    """Time tabulation: the factored form, Algorithm 2 and the dense product."""
    config = TabulateConfig(
        cases=tuple(_case(text) for text in case) if case else DEFAULT_CASES,
        num_columns=columns,
        repeats=repeats or 5,
        budget=budget,
        dense_limit=int(dense_limit * 1e6),
        memory=memory,
        device=device,
    )
    with progress_bar("tabulate") as progress:
        result = run_tabulate(config, progress)
    console = _console()
    console.print(bench_table.check_table(result["checks"]))
    console.print(bench_table.tabulate_table(result))
    console.print(
        "Bytes beyond input and output. Kept: the index tables or the fp32 incidence matrix, "
        "counted. Working: the rise of\nthe resident set of a fresh process in one run, input, "
        "output and kept tables already there. Faults: page faults a run."
    )
    _write(console, result, json_out)


@app.command(epilog=ATTENTION_EXAMPLES.format(name="prefill"))
def prefill(
    seq_len: SeqLens = None,
    vc_dim: VcDims = None,
    heads: Heads = 4,
    key_dim: KeyDim = 64,
    value_dim: ValueDim = 64,
    batch: Batch = 1,
    chunk_size: ChunkSize = 64,
    gated: Gated = False,
    both: Both = None,
    schedule: Schedules = None,
    window_step: Windows = None,
    against: AgainstOption = None,
    softmax_up_to: SoftmaxUpTo = 131072,
    softmax_heads: SoftmaxHeads = None,
    repeats: Repeats = None,
    budget: Budget = 60.0,
    memory: Memory = True,
    dtype: DtypeOption = Dtype.fp32,
    device: Device = "cpu",
    preset: PresetOption = None,
    json_out: JsonOut = None,
    figure_out: FigureOut = None,
) -> None:
    """Time the op forward, beside causal softmax, d = 1 and a matrix product."""
    _attention(**locals(), backward=False)


@app.command(epilog=ATTENTION_EXAMPLES.format(name="train"))
def train(
    seq_len: SeqLens = None,
    vc_dim: VcDims = None,
    heads: Heads = 4,
    key_dim: KeyDim = 64,
    value_dim: ValueDim = 64,
    batch: Batch = 1,
    chunk_size: ChunkSize = 64,
    gated: Gated = False,
    both: Both = None,
    schedule: Schedules = None,
    window_step: Windows = None,
    against: AgainstOption = None,
    softmax_up_to: SoftmaxUpTo = 65536,
    softmax_heads: SoftmaxHeads = None,
    repeats: Repeats = None,
    budget: Budget = 60.0,
    memory: Memory = True,
    dtype: DtypeOption = Dtype.fp32,
    device: Device = "cpu",
    preset: PresetOption = None,
    json_out: JsonOut = None,
    figure_out: FigureOut = None,
) -> None:
    """Time the op forward and backward, beside causal softmax, d = 1 and a matrix product."""
    _attention(**locals(), backward=True)


@app.command(epilog=DECODE_EXAMPLES)
def decode(
    context: Annotated[
        list[int] | None, typer.Option(help="Tokens in the context; repeatable (1K to 256K).")
    ] = None,
    vc_dim: VcDims = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences at once; may be repeated (1, 16).")
    ] = None,
    heads: Heads = 4,
    key_dim: KeyDim = 64,
    value_dim: ValueDim = 64,
    chunk_size: ChunkSize = 64,
    schedule: Annotated[
        list[Kind] | None, typer.Option(help="Boundary, fixed or window; repeatable (both).")
    ] = None,
    window_step: Annotated[
        int | None, typer.Option(help="Step of the window (a quarter of the context).")
    ] = None,
    softmax: Annotated[
        bool, typer.Option("--softmax/--no-softmax", help="Time softmax with a KV cache.")
    ] = True,
    steps: Annotated[int, typer.Option(help="Tokens to decode at each context.")] = 256,
    window_steps: Annotated[
        int, typer.Option(help="At most so many tokens of a window, around a move.")
    ] = 4096,
    passes: Annotated[int, typer.Option(help="Passes over a window's steps.")] = 3,
    budget: Annotated[float, typer.Option(help="Seconds for each decoder and context.")] = 30.0,
    max_gb: Annotated[
        float | None, typer.Option(help="GB for all states at once (70 % of what is free).")
    ] = None,
    dtype: DtypeOption = Dtype.fp32,
    device: Device = "cpu",
    json_out: JsonOut = None,
    figure_out: FigureOut = None,
) -> None:
    """Time one token of decoding against the context, beside softmax with a KV cache."""
    default = DecodeConfig()
    config = DecodeConfig(
        contexts=tuple(context or default.contexts),
        vc_dims=tuple(vc_dim or default.vc_dims),
        batches=tuple(batch or default.batches),
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        chunk_size=chunk_size,
        schedules=tuple(kind.value for kind in schedule) if schedule else default.schedules,
        window_step=window_step,
        softmax=softmax,
        steps=steps,
        window_steps=window_steps,
        passes=passes,
        budget=budget,
        max_bytes=None if max_gb is None else int(max_gb * 1e9),
        dtype=dtype.value,
        device=device,
    )
    with progress_bar("decode") as progress:
        result = run_decode(config, progress)
    console = _console()
    console.print(bench_table.check_table(result["checks"]))
    console.print(bench_table.decode_table(result))
    console.print(
        "x shortest: to the shortest context, timed in turns with it. Slowest: one step of the "
        "first pass.\nSlowest / median: of a window's steps around a move of its boundary, each "
        f"the fastest of {passes} passes."
    )
    for left_out in result["skipped"]:
        console.print(
            f"Left out: {left_out['name']} at {left_out['context']}, batch {left_out['batch']}, "
            f"which needs {left_out['bytes'] / 1e9:.1f} GB."
        )
    _write(console, result, json_out, figure_out)


@app.command(epilog=LAYERS_EXAMPLES)
def layers(
    seq_len: Annotated[int, typer.Option(help="Sequence length T.")] = 4096,
    batch: Batch = 1,
    heads: Heads = 4,
    head_dim: Annotated[int, typer.Option(help="Width of a head, and of its state.")] = 64,
    num_groups: Annotated[int, typer.Option(help="Groups of heads that share B and C.")] = 1,
    vc_dim: Annotated[int, typer.Option(help="VC dimension d of the memories.")] = 3,
    num_reads: Annotated[int, typer.Option(help="Types that a query reads.")] = 4,
    repeats: Repeats = None,
    budget: Budget = 60.0,
    device: Device = "cpu",
    json_out: JsonOut = None,
) -> None:
    """Time Mamba-2 and Gated DeltaNet beside transformers, and with a learned memory."""
    config = LayersConfig(
        seq_len, batch, heads, head_dim, num_groups, vc_dim, num_reads, repeats or 9, budget, device
    )
    with progress_bar("layers") as progress:
        result = run_layers(config, progress)
    console = _console()
    console.print(bench_table.check_table(result["checks"]))
    console.print(bench_table.layers_table(result))
    if result["missing"]:
        console.print(
            f"Not timed: {', '.join(result['missing'])}; they come with pip install smat[hf].",
            markup=False,
        )
    _write(console, result, json_out)


def _attention(*, backward: bool, preset: Preset | None, **options: Any) -> None:
    for name, value in PRESETS[preset.value].items() if preset else ():
        if not options[name]:
            options[name] = Against(value) if name == "against" else value
    lengths = tuple(options["seq_len"] or (4096, 16384))
    against = options["against"] or Against.sdpa
    config = AttentionConfig(
        backward=backward,
        seq_lens=lengths,
        vc_dims=tuple(options["vc_dim"] or (1, 2, 3, 4)),
        gates=(False, True) if options["both"] else (options["gated"],),
        window_steps=_window_steps(options["schedule"], options["window_step"], min(lengths)),
        softmax=against is Against.sdpa,
        repeats=options["repeats"] or 5,
        dtype=options["dtype"].value,
        **{
            name: options[name]
            for name in (
                "heads", "key_dim", "value_dim", "batch", "chunk_size", "softmax_up_to",
                "softmax_heads", "budget", "memory", "device",
            )
        },
    )  # fmt: skip
    with progress_bar("train" if backward else "prefill") as progress:
        result = run_attention(config, progress)
    console = _console()
    console.print(bench_table.check_table(result["checks"]))
    console.print(bench_table.attention_table(result))
    console.print(bench_table.rate_table(result["rates"], config.gemm_size))
    console.print(
        "x d=1: with the same gates. x plain: the same d without gates, boundary fixed. softmax x: "
        "how many times longer causal softmax takes.\nPeak extra: resident set of a fresh process "
        "beyond inputs and outputs; bound: (T^(1-1/d) + T/c) r p + c^2 words a head.\nExponent: "
        "fitted over the lengths above. Faults: page faults a run."
    )
    _write(console, result, options["json_out"], options["figure_out"])


def _window_steps(
    schedules: list[Kind] | None, steps: list[int] | None, shortest: int
) -> tuple[int | None, ...]:
    """The fixed boundary is always timed; a window if it or its step is asked for."""
    if schedules is not None and Kind.window not in schedules:
        if steps:
            raise ValueError(f"--window-step {steps[0]} needs --schedule window")
        return (None,)
    if schedules is not None and not steps:
        steps = [max(1, shortest // 16)]
    return (None, *(steps or []))


def _case(text: str) -> tuple[int, int]:
    try:
        field_size, vc_dim = (int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(
            f"a case is a field size and a VC dimension, as 17,4, not {text!r}"
        ) from None
    return field_size, vc_dim


def _console() -> Console:
    return Console(width=TABLE_WIDTH, highlight=False)


def _write(
    console: Console,
    result: Mapping[str, Any],
    json_out: Path | None,
    figure_out: Path | None = None,
) -> None:
    """Write the result, and the figure of a benchmark that has one."""
    name = result["benchmark"]
    where = result["environment"]
    console.print(
        f"{where['processor']}, {where['num_threads']} threads of {where['num_cores']} cores, "
        f"load {where['load_average']}, torch {where['torch']}, commit {where['commit']}"
    )
    path = OUT / f"bench_{name}.json" if json_out is None else json_out
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"Written to {path}", soft_wrap=True)
    if name not in ("tabulate", "layers"):
        picture = OUT / f"bench_{name}.png" if figure_out is None else figure_out
        console.print(f"Drawn into {save_figure(bench_figure(result), picture)}", soft_wrap=True)
