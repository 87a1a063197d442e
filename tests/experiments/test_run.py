"""A run is its configuration: it survives JSON, an unknown field raises, its hash names it."""

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pytest
import tiny_table
from tiny import Parity, TinyConfig

from smat.experiments.plain import find_class, from_plain, name_of, to_plain
from smat.experiments.registry import EXPERIMENTS
from smat.experiments.run import Run
from smat.tasks import MQAR
from smat.training import TrainingConfig

RUN = tiny_table.runs("quick", [0])[0]


def test_a_run_survives_json():
    plain = json.loads(json.dumps(RUN.to_dict()))
    again = Run.from_dict(plain)
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
            again = Run.from_dict(json.loads(json.dumps(run.to_dict())))
            assert again == run
            assert again.key == run.key
            keys.add(run.key)
        assert len(keys) == len(runs), "two runs of a table have the same settings and labels"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_seeds_can_be_chosen(name):
    experiment = EXPERIMENTS[name]
    for preset in experiment.presets:
        assert {run.seed for run in experiment.runs(preset, [7, 8])} == {7, 8}


@pytest.mark.parametrize(
    ("part", "kind"),
    [(None, "Run"), ("training", "TrainingConfig"), ("task", "Parity"), ("model", "TinyConfig")],
    ids=["run", "training", "task", "model"],
)
def test_an_unknown_field_raises_with_its_name_and_the_known_ones(part, kind):
    plain = RUN.to_dict()
    (plain if part is None else plain[part])["widht"] = 3
    with pytest.raises(ValueError, match=f"{kind} has no field 'widht'; it has ") as raised:
        Run.from_dict(plain)
    classes = {each.__name__: each for each in (Run, TrainingConfig, Parity, TinyConfig)}
    assert all(field.name in str(raised.value) for field in fields(classes[kind]))


def test_a_missing_field_is_named():
    plain = RUN.to_dict()
    del plain["training"]["steps"]
    with pytest.raises(ValueError, match="TrainingConfig needs the field 'steps'"):
        Run.from_dict(plain)


def test_every_setting_changes_the_key_and_how_often_to_save_does_not():
    changes = [replace(RUN, **{name: "x"}) for name in ("experiment", "preset", "arm", "cell")] + [
        replace(RUN, seed=1),
        replace(RUN, task=replace(RUN.task, length=5)),
        replace(RUN, model=TinyConfig(width=99)),
        replace(RUN, training=replace(RUN.training, steps=61)),
        replace(RUN, training=replace(RUN.training, clip=None)),
    ]
    assert len({RUN.key, *(run.key for run in changes)}) == len(changes) + 1
    assert replace(RUN, training=replace(RUN.training, checkpoint_seconds=9)).key == RUN.key


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


@dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Outer:
    inner: Inner
    other: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    maybe: Inner | None = None


def test_nested_configurations_keep_their_types():
    outer = Outer(Inner((3, 4)), other=MQAR(), options={"class": "plain", "size": 2}, maybe=Inner())
    plain = json.loads(json.dumps(to_plain(outer)))
    assert from_plain(Outer, plain) == outer
    assert "class" not in plain["inner"]
    assert plain["other"]["class"] == "MQAR"


def test_what_is_not_plain_is_refused():
    with pytest.raises(TypeError, match="a set is not plain"):
        to_plain(Outer(Inner(), options={"x": {1, 2}}))


def test_classes_are_found_by_name():
    assert find_class(name_of(MQAR)) is MQAR
    assert find_class(name_of(Parity)) is Parity
    for name in ("Nothing", "tiny:Nothing", "no_such_module:Thing", "json:dumps"):
        with pytest.raises(ValueError, match=r"no task or model|is not there"):
            find_class(name)
