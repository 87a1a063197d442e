"""The commands about experiments: list, run, status and report."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from smat.console import table_console
from smat.extras import require

if TYPE_CHECKING:  # torch and more, which help texts do without
    from smat.experiments.engine import Engine, Outcome

app = typer.Typer()

ROOT = Path("out/experiments")
STOPPED = 130  # what a shell returns after Ctrl-C
TRAIN_PACKAGES = ("lightning", "safetensors", "tensorboard")


def examples(*commands: str) -> str:
    """Lay out the examples below a command's help, which typer wants apart from each other."""
    return "\n\n".join(["Examples:", *(f"  {command}" for command in commands)])


EngineName = Literal["local", "ray"]
PrecisionName = Literal["fp32", "bf16"]
StrategyName = Literal["ddp", "fsdp", "tensor"]
Out = Annotated[Path, typer.Option(help="Folder of runs, records and the report.")]


@app.command("list", epilog=examples("smat list"))
def list_experiments(out: Out = ROOT) -> None:
    """List experiments and presets: their runs, how many you finished, how many are shipped."""
    from smat.experiments.store import Store
    from smat.experiments.tables import EXPERIMENTS

    table = Table(header_style="bold")
    for heading in ("experiment", "preset", "runs", "finished", "shipped", "what is reduced"):
        right = heading in ("runs", "finished", "shipped")
        fixed = heading != "what is reduced"
        table.add_column(heading, justify="right" if right else "left", no_wrap=fixed)
    for experiment in EXPERIMENTS.values():
        for index, (preset, line) in enumerate(experiment.presets.items()):
            counts = Store(out).count(experiment.runs(preset, None))
            name = experiment.name if index == 0 else ""
            table.add_row(name, preset, *map(str, counts), line)
        table.add_section()
    table_console().print(table)


@app.command(
    epilog=examples(
        "smat run subset-routing --preset quick",
        "smat run subset-routing --preset paper --seeds 0,1,2 --only 'smat_d*' --only k=2 --jobs 2",
        "smat run mqar --preset standard --engine ray --device cuda --out /shared/experiments",
        "smat run pg19-bytes --preset standard --data pg19 --only kept",
        "smat run pg19-bytes --preset standard --data pg19 --strategy fsdp --devices 8",
    )
    + "\n\nFinished runs are never repeated, interrupted ones go on where they were: run the same "
    "command."
)
def run(
    name: Annotated[str, typer.Argument(help="An experiment that `smat list` names.")],
    preset: Annotated[str, typer.Option(help="How much of the paper's settings.")] = "quick",
    seeds: Annotated[str | None, typer.Option(help="Seeds, as 0,1,2 (the preset's).")] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="An arm or a cell, or a pattern as 'smat_d*'; may be repeated."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs made at the same time (1).")] = None,
    engine: Annotated[EngineName, typer.Option(help="Here, or on a Ray cluster.")] = "local",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    precision: Annotated[
        PrecisionName | None, typer.Option(help="Of training (the preset's, fp32).")
    ] = None,
    strategy: Annotated[
        StrategyName | None,
        typer.Option(help="Of several devices: copies, sharded, or by heads (ddp)."),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Processes to a run on this machine (1).")
    ] = None,
    accumulate: Annotated[
        int | None, typer.Option(min=1, help="Parts of a device's batch, one after the other (1).")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="What `smat data prepare` wrote, for text (that of SMAT_DATA)."),
    ] = None,
    out: Out = ROOT,
    again: Annotated[bool, typer.Option("--again", help="Repeat finished runs too.")] = False,
    use_shipped: Annotated[
        bool, typer.Option("--use-shipped", help="Take records of results/ for finished runs.")
    ] = False,
) -> None:
    """Make the runs of an experiment that are not finished, and print its table."""
    if devices is not None and "RANK" not in os.environ:
        raise typer.Exit(start_processes(devices))
    if strategy is not None and "RANK" not in os.environ:
        raise ValueError(f"strategy {strategy} needs --devices, or torchrun around the command")
    from smat.data.shards import DATA_VARIABLE
    from smat.experiments.display import Display
    from smat.experiments.engine import SerialEngine, is_first_process, run_all
    from smat.experiments.run import PRECISIONS
    from smat.experiments.store import Store
    from smat.experiments.tables import find_experiment

    experiment, is_first = find_experiment(name), is_first_process()
    console = Console(stderr=True, quiet=not is_first)
    store = Store(out, use_shipped=use_shipped)
    if data is not None:
        os.environ[DATA_VARIABLE] = str(data.absolute())  # the processes of runs read it too
    if precision is not None:
        experiment = experiment.with_training(precision=PRECISIONS[precision])
    if accumulate is not None:
        experiment = experiment.with_training(accumulate=accumulate)
    runs = experiment.choose(preset, parse_seeds(seeds), only or ())
    for each in runs:
        each.task.source()  # what is missing is said once, and before anything is begun
    to_make = runs if again else store.unfinished(runs)
    counts = f"{len(runs)} runs, {len(runs) - len(to_make)} finished, {len(to_make)} to make"
    console.print(f"{experiment.name}, preset {preset}: {counts}", highlight=False)
    outcomes: list[Outcome] = []
    if to_make:
        made_by = _engine(engine, jobs, device)
        if "RANK" in os.environ:  # the processes make the same runs, whatever others finish
            again, count = True, int(os.environ["LOCAL_WORLD_SIZE"])
            made_by = SerialEngine(device, strategy or "ddp", count)
        if again and is_first and "RANK" not in os.environ:
            store.set_aside(to_make)  # so that the command to go on knows what is left
        with (
            Display(to_make, console) as display,
            stop_on_signal(lambda text: display.say(text, "yellow")) as should_stop,
        ):
            for outcome in run_all(to_make, store, made_by, display.progressed, should_stop, again):
                outcomes.append(outcome)
                display.ended(outcome)
    if not is_first:
        raise typer.Exit(0)
    from smat.report.page import print_table

    roots = store.roots if use_shipped else [out]
    print_table(experiment, preset, roots, table_console())
    kinds = [outcome.kind for outcome in outcomes]
    num_failed, num_left = kinds.count("failed"), len(to_make) - kinds.count("finished")
    if num_left:
        failed = f", {num_failed} failed" if num_failed else ""
        left = f"{num_left} of {len(to_make)} runs are left{failed}; go on with:"
        console.print(left, highlight=False)
        # Without --again: what it has finished is not repeated, the rest has no record any more.
        words = ["smat", "run", name, "--preset", preset]
        words += ["--seeds", seeds] if seeds is not None else []
        words += [word for choice in only or () for word in ("--only", choice)]
        words += ["--jobs", str(jobs)] if jobs is not None else []
        words += ["--engine", engine] if engine != "local" else []
        words += ["--device", device] if device != "auto" else []
        words += ["--precision", precision] if precision is not None else []
        words += ["--strategy", strategy] if strategy is not None else []
        words += ["--devices", str(devices)] if devices is not None else []
        words += ["--accumulate", str(accumulate)] if accumulate is not None else []
        words += ["--data", str(data)] if data is not None else []
        words += ["--use-shipped"] if use_shipped and not again else []
        words += ["--out", str(out)] if out != ROOT else []
        console.print(f"  {shlex.join(words)}", soft_wrap=True, highlight=False, markup=False)
    if num_failed:
        raise typer.Exit(1)
    if num_left and set(kinds) - {"busy"}:
        raise typer.Exit(STOPPED)


@app.command(epilog=examples("smat status", "smat status subset-routing --out /shared/experiments"))
def status(
    name: Annotated[str | None, typer.Argument(help="One experiment (all).")] = None,
    out: Out = ROOT,
) -> None:
    """Show what is finished, what is at work and what was interrupted."""
    from smat.experiments.store import Store
    from smat.experiments.tables import EXPERIMENTS, find_experiment

    store, console = Store(out), table_console()
    for experiment in EXPERIMENTS.values() if name is None else [find_experiment(name)]:
        for preset in experiment.presets:
            runs, finished, shipped = store.count(experiment.runs(preset, None))
            line = f"{experiment.name}, {preset}: {finished} of {runs}"
            console.print(line + f", records of {shipped} are shipped" * bool(shipped))
    for line in store.work_in_progress(name or "*"):
        console.print(f"  {line}", soft_wrap=True)


@app.command(
    epilog=examples(
        "smat report",
        "smat report --out /shared/experiments",
        "smat report --tables docs/results.md",
    )
)
def report(
    out: Out = ROOT,
    tables: Annotated[
        Path | None,
        typer.Option(help="Write the marked tables of this Markdown file anew instead of a page."),
    ] = None,
) -> None:
    """Write one HTML page and Markdown: every table beside the paper's."""
    from smat.experiments.store import Store

    if tables is not None:
        from smat.report.page import refresh_file

        typer.echo(f"{refresh_file(tables, Store(out).roots)} tables in {tables}")
        return
    from smat.report.page import write_report

    typer.echo(f"Report: {write_report(out, Store(out).roots)}")


def start_processes(count: int) -> int:
    """Start this command again in so many processes, and return what they return."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, f"--nproc_per_node={count}", "-m", "smat", *sys.argv[1:]]
    return subprocess.call(command)


def parse_seeds(text: str | None) -> list[int] | None:
    """Read seeds as the command line has them, 0,1,2."""
    try:
        return None if text is None else [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ValueError(f"seeds are whole numbers, as 0,1,2, not {text!r}") from None


@contextlib.contextmanager
def stop_on_signal(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C or SIGTERM into a request to stop, the second into an interruption."""
    asked = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        say("stopping at the next step; Ctrl-C again stops at once")

    is_main = threading.current_thread() is threading.main_thread()  # no other may handle signals
    signals = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _engine(name: EngineName, jobs: int | None, device: str) -> Engine:
    """Return an engine; what is missing is said before anything is begun."""
    from smat.experiments.engine import SerialEngine
    from smat.experiments.parallel import ProcessEngine, RayEngine
    from smat.training.fabric import parse_device

    for package in TRAIN_PACKAGES:
        require(package, extra="train")
    if name == "ray":
        require("ray", extra="ray")
        return RayEngine(jobs, device)
    parse_device(device)  # once, and not once a run
    return SerialEngine(device) if jobs in (None, 1) else ProcessEngine(jobs or 1, device)
