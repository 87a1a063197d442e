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
PRESETS = {
    "quick": Preset(reduced="All of it.", training=RECIPE, seeds=(0, 1)),
    "slow": Preset(reduced="All of it, slowly.", training=RECIPE, seeds=(0, 1)),
}
SECONDS = {"quick": 0.0, "slow": 0.04}


def runs(preset, seeds):
    cells = {
        f"T={length}": {
            "narrow": Arm("Narrow", Parity(length, SECONDS[preset]), TinyConfig(8), RECIPE),
            "wide": Arm("Wide", Parity(length, SECONDS[preset]), TinyConfig(16), RECIPE),
        }
        for length in (4, 6)
    }
    return PRESETS[preset].runs("parity", preset, cells, seeds)


PARITY = Experiment(
    "parity",
    "Parity of two bits",
    None,
    {"narrow": "Narrow", "wide": "Wide"},
    {"T=4": "T = 4", "T=6": "T = 6"},
    {name: preset.reduced for name, preset in PRESETS.items()},
    runs,
    "Nothing was chosen.",
)


if __name__ == "__main__":
    from smat.__main__ import main
    from smat.experiments.tables import EXPERIMENTS

    EXPERIMENTS["parity"] = PARITY
    sys.exit(main(sys.argv[1:]))
