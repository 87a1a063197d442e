"""The commands about experiments: list, run, status and report."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from smat.experiments.choose import choose_runs, parse_seeds
from smat.experiments.display import Clock, Display
from smat.experiments.engines import Engine, ProcessEngine, SerialEngine
from smat.experiments.execute import Outcome
from smat.experiments.options import (
    LIST_EXAMPLES,
    REPORT_EXAMPLES,
    RUN_EXAMPLES,
    STATUS_EXAMPLES,
    Again,
    Device,
    EngineName,
    Jobs,
    Name,
    Only,
    Out,
    Preset,
    Seeds,
    Where,
)
from smat.experiments.ray_engine import RayEngine
from smat.experiments.records import ROOT, Store
from smat.experiments.registry import EXPERIMENTS, find_experiment
from smat.experiments.run import Experiment, Run
from smat.experiments.runner import Stop, run_all, unfinished
from smat.experiments.work import work_in_progress
from smat.extras import missing_extra
from smat.training.fabric import parse_device

app = typer.Typer()

TABLE_WIDTH = 200
STOPPED = 130  # what a shell returns after Ctrl-C
TRAIN_PACKAGES = ("lightning", "safetensors", "tensorboard")


@app.command("list", epilog=LIST_EXAMPLES)
def list_experiments(out: Out = ROOT) -> None:
    """List experiments and presets, how many runs they have, and how many are finished."""
    store = Store(out)
    table = Table(header_style="bold")
    for heading in ("experiment", "preset", "runs", "finished", "what is reduced"):
        right = heading in ("runs", "finished")
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    for experiment in EXPERIMENTS.values():
        for index, (preset, line) in enumerate(experiment.presets.items()):
            runs = experiment.runs(preset, None)
            finished = len(runs) - len(unfinished(runs, store))
            name = experiment.name if index == 0 else ""
            table.add_row(name, preset, str(len(runs)), str(finished), line)
        table.add_section()
    Console(width=TABLE_WIDTH, highlight=False).print(table)


@app.command(epilog=RUN_EXAMPLES)
def run(
    name: Name,
    preset: Preset = "quick",
    seeds: Seeds = None,
    only: Only = None,
    jobs: Jobs = None,
    engine: Where = EngineName.local,
    device: Device = "auto",
    out: Out = ROOT,
    again: Again = False,
) -> None:
    """Make the runs of an experiment that are not finished, and print its table."""
    experiment, store = find_experiment(name), Store(out)
    runs = choose_runs(experiment, preset, parse_seeds(seeds), only or ())
    to_make = runs if again else unfinished(runs, store)
    error_console, console = Console(stderr=True), Console(width=TABLE_WIDTH, highlight=False)
    error_console.print(
        f"{experiment.name}, preset {preset}: {len(runs)} runs, "
        f"{len(runs) - len(to_make)} finished, {len(to_make)} to make",
        highlight=False,
    )
    outcomes: list[Outcome] = []
    if to_make:
        _require_extras(engine)
        if engine is EngineName.local:
            parse_device(device)  # once, and not once a run
        made_by = _engine(engine, jobs, device)
        outcomes = _make(runs, to_make, store, made_by, jobs or 1, again, error_console)
    _print_table(experiment, preset, store, console)
    command = _command(name, preset, seeds, only or (), jobs, engine, device, out)
    _end(outcomes, to_make, command, error_console)


@app.command(epilog=STATUS_EXAMPLES)
def status(
    name: Annotated[str | None, typer.Argument(help="One experiment (all).")] = None,
    out: Out = ROOT,
) -> None:
    """Show what is finished, what is at work and what was interrupted."""
    store = Store(out)
    chosen = EXPERIMENTS if name is None else {name: find_experiment(name)}
    console = Console(width=TABLE_WIDTH, highlight=False)
    for experiment in chosen.values():
        for preset in experiment.presets:
            runs = experiment.runs(preset, None)
            left = unfinished(runs, store)
            console.print(f"{experiment.name}, {preset}: {len(runs) - len(left)} of {len(runs)}")
    for work in work_in_progress(store):
        if name in (None, work.experiment):
            console.print(f"  {work.describe()}", soft_wrap=True)


@app.command(epilog=REPORT_EXAMPLES)
def report(
    out: Out = ROOT,
    tables: Annotated[
        Path | None,
        typer.Option(help="Write the marked tables of this Markdown file anew instead of a page."),
    ] = None,
) -> None:
    """Write one HTML page and Markdown: every table beside the paper's."""
    if tables is not None:
        from smat.report.text_tables import refresh_file

        typer.echo(f"{refresh_file(tables, Store(out).roots)} tables in {tables}")
        return
    from smat.report.page import write_report

    page = write_report(out, Store(out).roots)
    typer.echo(f"Report: {page}")


def _make(
    runs: Sequence[Run],
    to_make: Sequence[Run],
    store: Store,
    engine: Engine,
    jobs: int,
    again: bool,
    console: Console,
) -> list[Outcome]:
    clock = Clock(to_make, jobs)
    for finished in runs:
        record = store.find(finished)
        if record is not None and record.get("steps_per_second"):
            clock.learn(finished.arm, 1 / record["steps_per_second"])
    with Display(to_make, clock, console) as display:
        stop = Stop(
            lambda: display.say("stopping at the next step; Ctrl-C again stops at once", "yellow")
        )
        with stop.listening():
            return run_all(to_make, store, engine, listener=display, should_stop=stop, again=again)


def _engine(name: EngineName, jobs: int | None, device: str) -> Engine:
    if name is EngineName.ray:
        return RayEngine(jobs, device)
    return SerialEngine(device) if jobs in (None, 1) else ProcessEngine(jobs or 1, device)


def _require_extras(engine: EngineName) -> None:
    """Say what is missing before anything is begun; looking is quicker than importing."""
    needed = [(package, "train") for package in TRAIN_PACKAGES]
    if engine is EngineName.ray:
        needed.append(("ray", "ray"))
    for package, extra in needed:
        try:
            found = find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise missing_extra(package, extra)


def _print_table(experiment: Experiment, preset: str, store: Store, console: Console) -> None:
    from smat.report.text_tables import print_table

    print_table(experiment, preset, store.roots, console)


def _command(
    name: str,
    preset: str,
    seeds: str | None,
    only: Sequence[str],
    jobs: int | None,
    engine: EngineName,
    device: str,
    out: Path,
) -> str:
    """Spell the command that goes on, without --again: what is finished by then is not repeated."""
    words = ["smat", "run", name, "--preset", preset]
    words += ["--seeds", seeds] if seeds is not None else []
    words += [word for choice in only for word in ("--only", choice)]
    words += ["--jobs", str(jobs)] if jobs is not None else []
    words += ["--engine", engine.value] if engine is not EngineName.local else []
    words += ["--device", device] if device != "auto" else []
    words += ["--out", str(out)] if out != ROOT else []
    return shlex.join(words)


def _end(
    outcomes: Sequence[Outcome], to_make: Sequence[Run], command: str, console: Console
) -> None:
    """Say what is left to do, and end with a status that a script can read."""
    failed = sum(outcome.kind == "failed" for outcome in outcomes)
    left = len(to_make) - sum(outcome.kind == "finished" for outcome in outcomes)
    if left:
        count = f"{left} of {len(to_make)} runs are left" + (f", {failed} failed" if failed else "")
        console.print(f"{count}; go on with:", highlight=False)
        console.print(f"  {command}", soft_wrap=True, highlight=False, markup=False)
    if failed:
        raise typer.Exit(1)
    if left and not all(outcome.kind == "busy" for outcome in outcomes):
        raise typer.Exit(STOPPED)
