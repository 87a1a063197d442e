"""A run is its configuration: it survives JSON, an unknown field raises, its hash names it."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import tiny_table
from pydantic import BaseModel, ConfigDict
from tiny import Parity, TinyConfig, changed

from smat.experiments.run import Run, find_class, name_of
from smat.experiments.tables import EXPERIMENTS
from smat.tasks import MQAR

RUN = tiny_table.runs("quick", [0])[0]


def test_a_run_survives_json():
    plain = json.loads(json.dumps(RUN.to_dict()))
    again = Run.model_validate(plain)
    assert again == RUN
    assert again.key == RUN.key
    assert plain["task"]["class"] == "tiny:Parity"
    assert plain["training"]["checkpoint_seconds"] == 0.2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_run_of_every_experiment_survives_json(name):
    experiment = EXPERIMENTS[name]
    for preset in experiment.presets:
        runs = experiment.runs(preset, None)
        assert runs
        keys = set()
        for run in runs:
            assert (run.experiment, run.preset) == (name, preset)
            again = Run.model_validate(json.loads(json.dumps(run.to_dict())))
            assert again == run
            assert again.key == run.key
            keys.add(run.key)
        assert len(keys) == len(runs), "two runs of a table have the same settings and labels"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_seeds_can_be_chosen(name):
    experiment = EXPERIMENTS[name]
    for preset in experiment.presets:
        assert {run.seed for run in experiment.runs(preset, [7, 8])} == {7, 8}


@pytest.mark.parametrize("part", [None, "training", "task", "model"])
def test_an_unknown_field_raises_with_its_name(part):
    plain = RUN.to_dict()
    (plain if part is None else plain[part])["widht"] = 3
    with pytest.raises(ValueError, match=part or "Run") as raised:
        Run.model_validate(plain)
    assert "widht" in str(raised.value)


@pytest.mark.parametrize("part", [None, "training"])
def test_a_missing_field_is_named(part):
    plain = RUN.to_dict()
    name = "seed" if part is None else "steps"
    del (plain if part is None else plain[part])[name]
    with pytest.raises(ValueError, match=rf"{name}\n  Field required"):
        Run.model_validate(plain)


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


def test_classes_are_found_by_name():
    assert find_class(name_of(MQAR)) is MQAR
    assert find_class(name_of(Parity)) is Parity
    for name in ("Nothing", "tiny:Nothing", "no_such_module:Thing", "json:dumps"):
        with pytest.raises(ValueError, match=r"no task or model|cannot be found"):
            find_class(name)
