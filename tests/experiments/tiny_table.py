"""A table of tiny runs, as an experiment of its own: `python tiny_table.py run parity`."""

import sys

from tiny import Parity, TinyConfig

from smat.experiments.run import Arm, Experiment, Preset
from smat.training import TrainingConfig

RECIPE = TrainingConfig(
    steps=60, batch_size=8, learning_rate=1e-2, eval_every=25, balance_weight=0.01,
    schedule="cosine", warmup_steps=5, weight_decay=0.1, optimizer="adamw",
    checkpoint_seconds=0.2,
)  # fmt: skip


def cells(seconds):
    return {
        f"T={length}": {
            "narrow": Arm("Narrow", Parity(length, seconds), TinyConfig(8), RECIPE),
            "wide": Arm("Wide", Parity(length, seconds), TinyConfig(16), RECIPE),
        }
        for length in (4, 6)
    }


PARITY = Experiment.of_presets(
    name="parity",
    title="Parity of two bits",
    published=None,
    cells={"T=4": "T = 4", "T=6": "T = 6"},
    presets={
        "quick": Preset("All of it.", cells(seconds=0.0), seeds=(0, 1)),
        "slow": Preset("All of it, slowly.", cells(seconds=0.04), seeds=(0, 1)),
    },
    describe="Nothing was chosen.",
)
runs = PARITY.runs


if __name__ == "__main__":
    from smat.__main__ import main
    from smat.experiments.tables import EXPERIMENTS

    EXPERIMENTS["parity"] = PARITY
    sys.exit(main(sys.argv[1:]))
