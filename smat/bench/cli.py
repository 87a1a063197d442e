"""The `smat bench` commands: run a benchmark, print tables, write JSON and a figure."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.table import Table

from smat.bench import config as configs
from smat.report import bench_table
from smat.report.figures import bench_figure, save_figure

app = typer.Typer(
    help="Time the library: everything is checked first, and compared within one process.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Record = dict[str, Any]
Benchmark = Callable[[Any], Record]
OUT = Path("out")
JSON_OUT = Annotated[Path, typer.Option(help="Result to write, JSON (out/bench_*.json).")]
FIGURE_OUT = Annotated[Path, typer.Option(help="Figure to write (out/bench_*.png).")]
ATTENTION_EXAMPLES = (
    "--preset paper-figure",
    "--seq-len 65536 --vc-dim 3 --both --against none",
    "--seq-len 32768 --vc-dim 3 --window-step 2048",
    "--seq-len 65536 --softmax-heads 1 --repeats 9",
)


def options_of(model: type[BaseModel]) -> dict[str, Any]:
    """Annotate one option for each field of a model, by name, as typer wants it."""
    options = {}
    for name, field in model.model_fields.items():
        alias, shown = str(field.validation_alias or name), field.default
        flag, kind = f"--{alias.replace('_', '-')}", _bare(field.annotation)
        if get_origin(kind) is tuple:  # may be repeated; what is no number is read as text
            element = _bare(get_args(kind)[0])
            kind = list[str] if get_origin(element) else list[element]  # type: ignore[valid-type]
            shown = ", ".join(str(each) for each in shown)
        option = typer.Option(
            f"{flag}/{flag.replace('--', '--no-')}" if shown is True else flag,
            help=field.description,
            show_default=str(shown) if shown else False,
        )
        options[alias] = Annotated[kind, option]
    return options


def _bare(annotation: Any) -> Any:
    """Strip a type of None and of what pydantic notes beside it."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = get_args(annotation)[0]
    return annotation


def command(
    model: type[configs.BenchConfig], *examples: str, draws: bool = False
) -> Callable[[Benchmark], Benchmark]:
    """Make a command, with the options of a configuration, of a function that prints a record."""

    def register(run: Benchmark) -> Benchmark:
        def call(json_out: Path | None, figure_out: Path | None = None, **given: Any) -> None:
            asked = {name: value for name, value in given.items() if value is not None}
            try:
                config = model(**asked)
            except ValidationError as error:
                raise ValueError(explain(error)) from None
            _write(run(config), json_out, figure_out, draws)

        options = {**options_of(model), "json_out": JSON_OUT}
        options |= {"figure_out": FIGURE_OUT} if draws else {}
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=option)
            for name, option in options.items()
        ]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        lines = [f"smat bench {run.__name__} {example}" for example in ("", *examples)]
        epilog = "\n\n".join(["Examples:", *lines])
        app.command(run.__name__, help=run.__doc__, epilog=epilog)(call)
        return run

    return register


def explain(error: ValidationError) -> str:
    """Say on one line what is wrong with the first option that is."""
    found = error.errors()[0]
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    least = found.get("ctx", {}).get("ge")
    wrong = found["msg"] if least is None else f"must be {least} or more"
    return f"{found['loc'][0]} {wrong}, but it is {found['input']}"


@command(
    configs.TabulateConfig,
    "--case 17,4 --case 23,4 --repeats 9",
    "--case 5,3 --columns 64 --no-memory",
)
def tabulate(config: configs.TabulateConfig) -> Record:
    """Time tabulation: the factored form, Algorithm 2 and the dense product."""
    from smat.bench.tabulate import run_tabulate

    record = run_tabulate(config)
    return _print(
        record,
        bench_table.tabulate_table(record),
        "Bytes beyond input and output. Kept: the index tables or the fp32 incidence matrix, "
        "counted. Working: the rise of\nthe resident set of a fresh process in one run, input, "
        "output and kept tables already there. Faults: page faults a run.",
    )


@command(configs.PrefillConfig, *ATTENTION_EXAMPLES, draws=True)
def prefill(config: configs.PrefillConfig) -> Record:
    """Time the op forward, beside causal softmax, d = 1 and a matrix product."""
    from smat.bench.attention import run_attention

    record = run_attention(config)
    return _print(
        record,
        bench_table.attention_table(record),
        bench_table.rate_table(record["rates"], config.gemm_size),
        "x d=1: with the same gates. x plain: the same d without gates, boundary fixed. softmax x: "
        "how many times longer causal softmax takes.\nPeak extra: resident set of a fresh process "
        "beyond inputs and outputs; bound: (T^(1-1/d) + T/c) r p + c^2 words a head.\nExponent: "
        "fitted over the lengths above. Faults: page faults a run.",
    )


@command(configs.TrainConfig, *ATTENTION_EXAMPLES, draws=True)
def train(config: configs.TrainConfig) -> Record:
    """Time the op forward and backward, beside causal softmax, d = 1 and a matrix product."""
    return prefill(config)


@command(
    configs.DecodeConfig,
    "--context 1024 --context 65536 --vc-dim 3 --batch 1",
    "--schedule window --window-step 4096 --no-softmax",
    draws=True,
)
def decode(config: configs.DecodeConfig) -> Record:
    """Time one token of decoding against the context, beside softmax with a KV cache."""
    from smat.bench.decode import run_decode

    record = run_decode(config)
    return _print(
        record,
        bench_table.decode_table(record),
        "x shortest: to the shortest context, timed in turns with it. Slowest: one step of the "
        "first pass.\nSlowest / median: of a window's steps around a move of its boundary, each "
        f"the fastest of {config.passes} passes.",
        *(
            f"Left out: {left_out['name']} at {left_out['context']}, batch {left_out['batch']}, "
            f"which needs {left_out['bytes'] / 1e9:.1f} GB."
            for left_out in record["skipped"]
        ),
    )


@command(configs.LayersConfig, "--seq-len 16384 --vc-dim 2 --repeats 5")
def layers(config: configs.LayersConfig) -> Record:
    """Time Mamba-2 and Gated DeltaNet beside transformers, and with a learned memory."""
    from smat.bench.layers import run_layers

    record = run_layers(config)
    missing = ", ".join(record["missing"])
    note = [f"Not timed: {missing}; they come with pip install smat[hf]."] if missing else []
    return _print(record, bench_table.layers_table(record), *note)


def _print(record: Record, *tables_and_notes: Table | str) -> Record:
    """Print what was checked, tables, notes, and where the benchmark ran."""
    console = Console(width=240, highlight=False, markup=False)  # no number is ever cut to fit
    where = record["environment"]
    for each in (
        bench_table.check_table(record["checks"]),
        *tables_and_notes,
        f"{where['processor']}, {where['num_threads']} threads of {where['num_cores']} cores, "
        f"load {where['load_average']}, torch {where['torch']}, commit {where['commit']}",
    ):
        console.print(each)
    return record


def _write(record: Record, json_out: Path | None, figure_out: Path | None, draws: bool) -> None:
    name = record["benchmark"]
    path = OUT / f"bench_{name}.json" if json_out is None else json_out
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    typer.echo(f"Written to {path}")
    if draws:
        picture = OUT / f"bench_{name}.png" if figure_out is None else figure_out
        typer.echo(f"Drawn into {save_figure(bench_figure(record), picture)}")
