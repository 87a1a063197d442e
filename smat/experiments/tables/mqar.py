"""Multi-query associative recall (tab:mqar-results): a backbone, its log-linear form, with SMat."""

from __future__ import annotations

from collections.abc import Sequence

from smat.experiments.recall_models import recall_arms, recall_model
from smat.experiments.run import Experiment, Run
from smat.tasks import MQAR
from smat.training import TrainingConfig

DESCRIBE = """\
Two mixer layers with RMSNorm and residual, no MLP and no positions, head and state dimension 16, \
short convolution 4, tied read-out. Mamba-2 with expansion 2; Gated DeltaNet with 1, 2, 2 heads \
for widths 16, 32, 64, values as wide as keys and an output gate. SMat is the learned four-read \
form with one hash and one scorer for every field size, and the balance loss at 0.01 annealed \
over 1,000 steps. AdamW at 1e-2 with weight decay 0.1 on matrices, clipping at 1, cosine to a \
tenth, batch 256 (the paper's appendix; the trainer of its data pipeline clips nothing and decays \
everything), batches of all loads in random order. \
The accuracy is that of the last step, averaged over queries, examples and the five loads."""

ARMS = recall_arms()
CELLS = {f"width={width}": f"width {width}" for width in (16, 32, 64)}
PRESETS = {
    "quick": "128 tokens, one load (T = 64, 8 pairs), width 32, Mamba-2 alone and with d = 2, "
    "1,000 steps of 64 examples",
    "standard": "128 tokens, one load (T = 64, 8 pairs), width 32, Mamba-2 forms, "
    "3,000 steps of 64 examples",
    "paper": "as in the paper: 32 epochs of 180,000 examples, three seeds",
}
SEEDS = {"quick": (0,), "standard": (0,), "paper": (123, 456, 789)}
QUICK_ARMS = ("mamba2", "mamba2_smat_d2")
STANDARD_ARMS = ("mamba2", "mamba2_log_linear", "mamba2_smat_d2", "mamba2_smat_d3")
NUM_EPOCHS = 32


def task_of(preset: str) -> MQAR:
    """Return the task of a preset."""
    if preset != "paper":
        return MQAR(128, train_loads=((64, 8, 64_000),), eval_loads=((64, 8),), num_eval=500)
    return MQAR(shuffle_batches=True)


def run(preset: str, arm: str, width: int, seed: int) -> Run:
    """Return one run of the table."""
    task = task_of(preset)
    batch_size = 256 if preset == "paper" else 64
    steps = {"quick": 1000, "standard": 3000}.get(preset)
    training = TrainingConfig(
        steps=NUM_EPOCHS * task.steps_per_epoch(batch_size) if steps is None else steps,
        batch_size=batch_size,
        learning_rate=1e-2,
        optimizer="adamw",
        weight_decay=0.1,
        schedule="cosine",
        final_fraction=0.1,
        eval_every=0 if preset == "paper" else 250,
        balance_weight=0.01 if "smat" in arm else 0.0,
    )
    model = recall_model(arm, width)
    return Run("mqar", preset, arm, f"width={width}", seed, task, model, training)


def runs(preset: str, seeds: Sequence[int] | None = None) -> list[Run]:
    """Return the runs of a preset."""
    arms = {"quick": QUICK_ARMS, "standard": STANDARD_ARMS}.get(preset, tuple(ARMS))
    return [
        run(preset, arm, width, seed)
        for seed in (SEEDS[preset] if seeds is None else seeds)
        for arm in arms
        for width in ((16, 32, 64) if preset == "paper" else (32,))
    ]


MQAR_TABLE = Experiment(
    name="mqar",
    title="Multi-query associative recall",
    published="tab:mqar-results",
    arms=ARMS,
    cells=CELLS,
    presets=PRESETS,
    runs=runs,
    describe=DESCRIBE,
)
