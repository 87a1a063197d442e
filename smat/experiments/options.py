"""What the commands about experiments take, and examples of their use."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

RUN_EXAMPLES = """Examples:

  smat run subset-routing --preset quick

  smat run subset-routing --preset paper --seeds 0,1,2 --only 'smat_d*' --only k=2 --jobs 2

  smat run mqar --preset standard --engine ray --device cuda --out /shared/experiments

Finished runs are never repeated, interrupted ones go on where they were: run the same command.
"""
LIST_EXAMPLES = """Example:

  smat list
"""
STATUS_EXAMPLES = """Examples:

  smat status

  smat status subset-routing --out /shared/experiments
"""
REPORT_EXAMPLES = """Examples:

  smat report

  smat report --out /shared/experiments

  smat report --tables README.md
"""

Out = Annotated[Path, typer.Option(help="Folder of runs, records and the report.")]


class EngineName(str, Enum):
    """Where runs are made, by the names that `--engine` takes."""

    local = "local"
    ray = "ray"


Name = Annotated[str, typer.Argument(help="An experiment that `smat list` names.")]
Preset = Annotated[str, typer.Option(help="How much of the paper's settings.")]
Seeds = Annotated[str | None, typer.Option(help="Seeds, as 0,1,2 (the preset's).")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="An arm or a cell, or a pattern as 'smat_d*'; may be repeated."),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Runs made at the same time (1).")]
Where = Annotated[EngineName, typer.Option(help="Here, or on a Ray cluster.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Again = Annotated[bool, typer.Option("--again", help="Repeat finished runs too.")]
