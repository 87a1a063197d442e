"""Multi-query associative recall (tab:mqar-results): a backbone, its log-linear form, with SMat."""

from __future__ import annotations

from typing import Any

from smat.experiments.run import Arm, Experiment, Preset
from smat.models import ModelConfig
from smat.tasks import MQAR, Task
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

WIDTHS = (16, 32, 64)
DELTA_HEADS = {16: 1, 32: 2, 64: 2}  # heads of dimension 16 of Gated DeltaNet, by width
MAMBA2: dict[str, Any] = {"state_dim": 16, "expand": 2}
RECIPE = TrainingConfig(
    steps=32 * MQAR().steps_per_epoch(256), batch_size=256, learning_rate=1e-2, optimizer="adamw",
    weight_decay=0.1, schedule="cosine",
)  # fmt: skip
SMALL = MQAR(vocab_size=128, train_loads=((64, 8, 64_000),), eval_loads=((64, 8),), num_eval=500)
SMALL_RECIPE = RECIPE.changed(steps=3000, batch_size=64, eval_every=250)


def two_layers(mixer: str, width: int, **options: Any) -> ModelConfig:
    """Return a model with heads of dimension 16."""
    options = {"head_dim": 16, **options}
    return ModelConfig(mixer=mixer, width=width, num_layers=2, options=options, tied=True)


def delta_options(width: int) -> dict[str, Any]:
    """Return the options of Gated DeltaNet in a model of this width."""
    return {"num_heads": DELTA_HEADS.get(width, max(1, width // 32)), "expand_v": 1.0}


def recall_arms(task: Task, width: int, training: TrainingConfig) -> dict[str, Arm]:
    """Return the rows that this table and joint recall have in common."""
    balanced = training.changed(balance_weight=0.01)
    rows: dict[str, Arm] = {}
    for name, label, options in (
        ("gated_deltanet", "Gated DeltaNet", delta_options(width)),
        ("mamba2", "Mamba-2", MAMBA2),
    ):
        rows[name] = Arm(label, task, two_layers(name, width, **options), training)
        log_linear = two_layers(f"{name}_log_linear", width, **options)
        rows[f"{name}_log_linear"] = Arm(f"{label}, Log-Linear", task, log_linear, training)
        for d in (2, 3, 4):
            model = two_layers(f"{name}_smat", width, **options, vc_dim=d)
            rows[f"{name}_smat_d{d}"] = Arm(f"{label} + SMat (d = {d})", task, model, balanced)
    return rows


MQAR_TABLE = Experiment.of_presets(
    name="mqar",
    title="Multi-query associative recall",
    published="tab:mqar-results",
    cells={f"width={width}": f"width {width}" for width in WIDTHS},
    presets={
        "quick": Preset(
            "128 tokens, one load (T = 64, 8 pairs), width 32, Mamba-2 alone and with d = 2, "
            "1,000 steps of 64 examples",
            {"width=32": recall_arms(SMALL, 32, SMALL_RECIPE.changed(steps=1000))},
            arms=("mamba2", "mamba2_smat_d2"),
        ),
        "standard": Preset(
            "128 tokens, one load (T = 64, 8 pairs), width 32, Mamba-2 forms, "
            "3,000 steps of 64 examples",
            {"width=32": recall_arms(SMALL, 32, SMALL_RECIPE)},
            arms=("mamba2", "mamba2_log_linear", "mamba2_smat_d2", "mamba2_smat_d3"),
        ),
        "paper": Preset(
            "as in the paper: 32 epochs of 180,000 examples, three seeds",
            {f"width={w}": recall_arms(MQAR(shuffle_batches=True), w, RECIPE) for w in WIDTHS},
            seeds=(123, 456, 789),
        ),
    },
    describe=DESCRIBE,
)
