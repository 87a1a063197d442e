"""A run is its configuration: plain data, an unknown field raises, its hash names it."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
import tiny_table
from pydantic import BaseModel, ConfigDict
from tiny import TinyConfig, changed

from smat.experiments.run import Run
from smat.tasks import MQAR

RUN = tiny_table.runs("quick", [0])[0]


def test_a_run_is_plain_data_with_the_names_of_its_classes():
    plain = RUN.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["task"] == {"class": "tiny:Parity", **asdict(RUN.task)}
    assert plain["training"]["checkpoint_seconds"] == 0.2
    assert changed(RUN, task=MQAR()).to_dict()["task"]["class"] == "MQAR"


def test_an_unknown_or_missing_field_is_named():
    with pytest.raises(ValueError, match=r"widht\n  Extra inputs are not permitted"):
        changed(RUN, widht=3)
    with pytest.raises(ValueError, match=r"seed\n  Field required"):
        Run(**{name: value for name, value in RUN if name != "seed"})


def test_every_setting_changes_the_key_and_how_often_to_save_does_not():
    changes = [changed(RUN, **{name: "x"}) for name in ("experiment", "preset", "arm", "cell")] + [
        changed(RUN, seed=1),
        changed(RUN, task=replace(RUN.task, length=5)),
        changed(RUN, model=TinyConfig(width=99)),
        changed(RUN, training=changed(RUN.training, steps=61)),
        changed(RUN, training=changed(RUN.training, clip=None)),
    ]
    assert len({RUN.key, *(run.key for run in changes)}) == len(changes) + 1
    assert changed(RUN, training=changed(RUN.training, checkpoint_seconds=9)).key == RUN.key


def test_the_key_is_the_same_in_every_process():
    script = (
        f"import sys; sys.path[:0] = {sys.path!r}\n"
        "import tiny_table; print(tiny_table.runs('quick', [0])[0].key)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == RUN.key
    assert len(RUN.key) == 12
    int(RUN.key, 16)


class Loads(BaseModel):
    """A configuration that is pydantic's, as one of a user may be."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    sizes: tuple[int, ...] = (1, 2)
    options: dict[str, Any] = {}

    def build(self, task):
        return None


def test_a_pydantic_configuration_is_one_too():
    run = changed(RUN, model=Loads(sizes=(3, 4), options={"class": "plain", "size": 2}))
    plain = json.loads(json.dumps(run.to_dict()))
    assert plain["model"]["sizes"] == [3, 4]
    assert plain["model"]["class"] == f"{__name__}:Loads"
    assert changed(RUN, model=Loads()).key not in (run.key, RUN.key)
    assert changed(RUN, model=Loads(options={})).key == changed(RUN, model=Loads()).key


def test_what_is_not_plain_is_refused():
    with pytest.raises(ValueError, match="Unable to serialize unknown type"):
        changed(RUN, model=Loads(options={"x": object()})).to_dict()
