"""A table of tiny runs, as an experiment of its own: `python tiny_table.py run parity`."""

import sys

from tiny import Parity, TinyConfig

from smat.experiments.run import Experiment, Run
from smat.training import TrainingConfig

SECONDS = {"quick": 0.0, "slow": 0.04}


def runs(preset, seeds):
    training = TrainingConfig(
        steps=60, batch_size=8, learning_rate=1e-2, eval_every=25, balance_weight=0.01,
        schedule="cosine", warmup_steps=5, weight_decay=0.1, optimizer="adamw",
        checkpoint_seconds=0.2,
    )  # fmt: skip
    return [
        Run(
            "parity", preset, arm, cell, seed, Parity(int(cell[2:]), SECONDS[preset]),
            TinyConfig(width), training,
        )
        for seed in ([0, 1] if seeds is None else seeds)
        for arm, width in (("narrow", 8), ("wide", 16))
        for cell in ("T=4", "T=6")
    ]  # fmt: skip


PARITY = Experiment(
    "parity",
    "Parity of two bits",
    None,
    {"narrow": "Narrow", "wide": "Wide"},
    {"T=4": "T = 4", "T=6": "T = 6"},
    {"quick": "All of it.", "slow": "All of it, slowly."},
    runs,
    "Nothing was chosen.",
)


if __name__ == "__main__":
    from smat.__main__ import main
    from smat.experiments.registry import EXPERIMENTS

    EXPERIMENTS["parity"] = PARITY
    sys.exit(main(sys.argv[1:]))
