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

from smat.bench import config as configs
from smat.bench import model_configs
from smat.console import table_console
from smat.extras import called_later

app = typer.Typer(
    help="Time the library: everything is checked first, and compared within one process.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
Record = dict[str, Any]
OUT = Path("out")
JSON_OUT = Annotated[Path, typer.Option(help="Result to write, JSON (below out/).")]
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


def add_command(
    name: str,
    model: type[configs.Config],
    run: Callable[[Any], Record],
    *examples: str,
    draws: bool = False,
    show: Callable[[Record], None] | None = None,
    json_out: Path | None = None,
) -> None:
    """Make a command of a benchmark: its help and its options are those of its configuration."""

    written = json_out or OUT / f"bench_{name}.json"

    def call(json_out: Path | None, figure_out: Path | None = None, **given: Any) -> None:
        asked = {option: value for option, value in given.items() if value is not None}
        try:
            config = model(**asked)
        except ValidationError as error:
            raise ValueError(explain(error)) from None
        record = run(config)
        (show or print_record)(record)
        path = json_out or written
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")
        typer.echo(f"Written to {path}")
        if draws:
            from smat.report.figures import bench_figure, save_figure

            picture = figure_out or OUT / f"bench_{name}.png"
            typer.echo(f"Drawn into {save_figure(bench_figure(record), picture)}")

    options = {**options_of(model), "json_out": JSON_OUT}
    options |= {"figure_out": FIGURE_OUT} if draws else {}
    parameters = [
        inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for option, kind in options.items()
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    lines = [f"smat bench {name} {example}" for example in ("", *examples)]
    app.command(name, help=model.__doc__, epilog="\n\n".join(["Examples:", *lines]))(call)


def explain(error: ValidationError) -> str:
    """Say on one line what is wrong with the first option that is."""
    found = error.errors()[0]
    if found["type"] == "value_error":
        return str(found["ctx"]["error"])
    least = found.get("ctx", {}).get("ge")
    wrong = found["msg"] if least is None else f"must be {least} or more"
    return f"{found['loc'][0]} {wrong}, but it is {found['input']}"


def print_record(record: Record) -> None:
    """Print what was checked, the rows, what comes with them, and where the benchmark ran."""
    from smat.report.terminal_tables import rows_tables, worst_checks

    console = table_console()
    rows, where = record["rows"], record["environment"]
    fields = ("batch", "seq_len", "field_size", "kind")
    ruled_by = next((name for name in fields if rows and name in rows[0]), None)
    checks = worst_checks(record["checks"])
    console.print(*rows_tables("Checked against an oracle in fp64 (relative RMS)", checks))
    console.print(*rows_tables(f"{record['benchmark']}, milliseconds", rows, ruled_by))
    growth = [{"name": name, "exponent": b} for name, b in record.get("growth", {}).items()]
    for title, more in {
        "Time as T^exponent, fitted over the lengths above": growth,
        "GFLOP/s, beside a matrix product": record.get("rates"),
        "Left out, for want of memory": record.get("skipped"),
        "Left out, since they refuse": record.get("refused"),
    }.items():
        if more:
            console.print(*rows_tables(title, more))
    if record.get("missing"):
        missing = ", ".join(record["missing"])
        console.print(f"Not timed: {missing}; they come with pip install smat[hf].")
    console.print(", ".join(f"{name} {value}" for name, value in record["config"].items()))
    console.print(
        f"{where['processor']}, {where['num_threads']} threads of {where['num_cores']} cores, "
        f"load {where['load_average']}, torch {where['torch']}, commit {where['commit']}"
    )


def print_kernels(record: Record) -> None:
    """Print what kernels need when compiled, the bytes they move, and what that would take."""
    from smat.report.terminal_tables import rows_tables

    for title, rows, ruled_by in (
        ("Compiled, not run: the worst form of each kernel", record["compiled"], "compiled_for"),
        ("Bytes, counted from the kernels' loads and stores", record["bytes"], "name"),
    ):
        if rows:
            table_console().print(*rows_tables(title, rows, ruled_by))


def print_models(record: Record) -> None:
    """Print what was checked, and the costs beside the paper's."""
    from rich.markdown import Markdown

    from smat.report.costs import LABEL, cost_table
    from smat.report.page import format_costs
    from smat.report.records import load_published
    from smat.report.terminal_tables import rows_tables, worst_checks

    console = table_console()
    checks = worst_checks(record["checks"])
    console.print(*rows_tables("Checked against the full forward pass in fp64", checks))
    costs = cost_table("costs", record, load_published()[LABEL])
    console.print(Markdown(format_costs(costs, console.width)))
    if record["skipped"]:
        console.print(*rows_tables("Left out, for want of memory", record["skipped"]))


def _of(module: str, name: str) -> Callable[[Any], Record]:
    """Name the function behind a command; help is printed without importing it."""
    return called_later(f"smat.bench.{module}", name)


def print_ranks(record: Record) -> None:
    """Print what each rank holds and sends, and how long a scan takes."""
    from smat.report.terminal_tables import rows_tables

    console = table_console()
    console.print(*rows_tables("Checked against one process, fp64", record["checks"]))
    console.print(*rows_tables("Forward and backward, of each rank", record["rows"], "ranks"))
    if record["scans"]:
        console.print(*rows_tables("A scan of states over ranks", record["scans"], "ranks"))
    console.print(", ".join(f"{name} {value}" for name, value in record["config"].items()))


add_command(
    "tabulate",
    configs.TabulateConfig,
    _of("tabulate", "run_tabulate"),
    "--case 17,4 --case 23,4 --repeats 9",
    "--case 5,3 --columns 64 --no-memory",
)
for _name, _config in (("prefill", configs.PrefillConfig), ("train", configs.TrainConfig)):
    _run = _of("attention", "run_attention")
    add_command(_name, _config, _run, *ATTENTION_EXAMPLES, draws=True)
add_command(
    "decode",
    configs.DecodeConfig,
    _of("decode", "run_decode"),
    "--context 1024 --context 65536 --vc-dim 3 --batch 1",
    "--schedule window --window-step 4096 --no-softmax",
    draws=True,
)
add_command(
    "kernels",
    configs.KernelsConfig,
    _of("kernels", "run_kernels"),
    "--no-compile",
    "--device sm_90 --width 64 --dtype bf16 --no-bytes",
    show=print_kernels,
)
add_command(
    "backends",
    configs.BackendsConfig,
    _of("backends", "run_backends"),
    "--seq-len 65536 --vc-dim 1",
)
add_command(
    "layers",
    configs.LayersConfig,
    _of("layers", "run_layers"),
    "--seq-len 16384 --vc-dim 2 --repeats 5",
)
add_command(
    "models",
    model_configs.ModelsConfig,
    _of("models", "run_models"),
    "--preset cpu",
    "--preset paper --device cuda",
    "--model smat_d3 --model softmax --train-len 8192 --context 65536",
    show=print_models,
    json_out=OUT / "experiments" / "costs" / "models.json",
)
add_command(
    "lm-step",
    model_configs.StepConfig,
    _of("language_model", "run_step"),
    "--boundary kept",
    "--checkpointing",
)
add_command(
    "lm-generate",
    model_configs.GenerateConfig,
    _of("language_model", "run_generate"),
    "--tokens 500 --boundary kept",
)
add_command(
    "ranks",
    model_configs.RanksConfig,
    _of("ranks", "run_ranks"),
    "--window-step 4096",
    show=print_ranks,
)
