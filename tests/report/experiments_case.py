"""An experiment and records of it, made up: no number here was measured."""

import json
from dataclasses import dataclass
from html.parser import HTMLParser

from smat.experiments.run import Experiment, Run
from smat.report.records import Record
from smat.training import TrainingConfig

ARMS = {"softmax": "Softmax", "smat_d2": "SMat <d|2> & *co*", "smat_d3": "SMat (d = 3)"}
CELLS = {"k=1": "k = 1", "k=2": "k = 2", "k=3": "k = 3"}
PUBLISHED = {
    "tab:made-up": {
        "caption": "Made up",
        "source": "Table 99",
        "unit": "%",
        "rows": {"softmax": "Softmax", "smat_d2": "d = 2", "oracle": "An oracle"},
        "columns": CELLS,
        "values": {
            "softmax": {"k=1": [100.0, 0.0], "k=2": [46.55, 2.35], "k=3": [7.81, None]},
            "smat_d2": {"k=1": [99.93, 0.11]},
            "oracle": {"k=1": [98.76, 0.54]},
        },
    },
    "tab:elsewhere": {
        "caption": "Bits per <byte>",
        "source": "Table 77",
        "unit": "bits",
        "rows": {"none": "No branch", "kept": "Kept"},
        "columns": {"a": "[0, 1024)", "b": "size"},
        "values": {
            "none": {"a": [1.686, 0.006], "b": [99, None]},
            "kept": {"a": [1.67, 0.01], "b": [0.5, None]},
        },
        "notes": {"kept/b": "a remark"},
    },
}


@dataclass(frozen=True)
class Needle:
    """A task, as far as a report asks for it, and a model that nobody builds."""

    def describe(self):
        return "Find <the> `needle`.\n\n- in hay\n- in straw"


def runs(preset, seeds=None):
    training = TrainingConfig(steps=10, batch_size=2, learning_rate=0.1)
    return [
        Run(
            experiment="made-up", preset=preset, arm=arm, cell=cell, seed=seed, task=Needle(),
            model=Needle(), training=training,
        )
        for arm in ARMS
        for cell in CELLS
        for seed in ((0, 1, 2) if seeds is None else seeds)
    ]  # fmt: skip


def key_of(preset, arm, cell, seed):
    found = [each.key for each in runs(preset, [seed]) if (each.arm, each.cell) == (arm, cell)]
    return found[0] if found else f"{arm} and {cell} are unknown"


EXPERIMENT = Experiment(
    name="made-up",
    title="Made up & <found>",
    published="tab:made-up",
    arms=ARMS,
    cells=CELLS,
    presets={"quick": "a tenth of the steps", "paper": "as in the paper."},
    runs=runs,
    describe="Chosen: everything.",
)


def make_record(arm, cell, seed, accuracy, preset="paper", **changes):
    plain = plain_record(arm, cell, seed, accuracy, preset, **changes)
    return Record.model_validate_json(json.dumps(plain))


def plain_record(arm, cell, seed, accuracy, preset="paper", **changes):
    run = {"experiment": "made-up", "preset": preset, "arm": arm, "cell": cell, "seed": seed}
    return {
        "version": 1,
        "key": key_of(preset, arm, cell, seed),
        "run": run,
        "accuracy": accuracy,
        "by_cell": {"": accuracy},
        "loss": 0.25,
        "controls": {},
        "curve": [[10, 0.7, None], [20, 0.4, accuracy / 2], [30, 0.25, accuracy]],
        "parameters": 58_088,
        "minutes": 4.5,
        "steps_per_second": 3.0,
        "hardware": {"cpu": "A <CPU>", "cores": 2, "torch": "2.13.0", "device": "cpu"},
        "commit": "0123456789abcdef",
        "finished": "2026-11-16T01:02:03+00:00",
        **changes,
    }


def write_record(folder, record):
    run = record.run
    path = folder / run.experiment / run.preset / run.arm / f"{run.cell}-s{run.seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(record.model_dump_json())
    return path


class Page(HTMLParser):
    """Read a page, insist that every element is closed in its order, and keep its tables."""

    VOID = ("meta", "br", "img", "input", "link", "hr")

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tables, self.ids, self.links, self.fetched = [], [], [], [], []
        self.words = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.links += [values["href"]] if tag == "a" else []
        self.fetched += [values[name] for name in ("src", "srcset", "poster") if name in values]
        self.fetched += [values["href"]] if tag in ("link", "image", "use") else []
        assert tag not in ("script", "iframe", "object", "embed")
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
        elif "style" not in self.open:
            self.words.append(data)
