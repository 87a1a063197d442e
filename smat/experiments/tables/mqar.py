"""Multi-query associative recall (tab:mqar-results): a backbone, its log-linear form, with SMat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smat.experiments.run import Arm, Experiment, Preset, Run, Seeds
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
    steps=32 * MQAR().steps_per_epoch(256),
    batch_size=256,
    learning_rate=1e-2,
    optimizer="adamw",
    weight_decay=0.1,
    schedule="cosine",
)
SMALL = MQAR(vocab_size=128, train_loads=((64, 8, 64_000),), eval_loads=((64, 8),), num_eval=500)
SMALL_RECIPE = RECIPE.changed(steps=3000, batch_size=64, eval_every=250)


@dataclass(frozen=True, kw_only=True)
class RecallPreset(Preset):
    """The task with its loads, and the widths of models."""

    task: Task
    widths: tuple[int, ...]


PRESETS = {
    "quick": RecallPreset(
        reduced="128 tokens, one load (T = 64, 8 pairs), width 32, Mamba-2 alone and with d = 2, "
        "1,000 steps of 64 examples",
        task=SMALL,
        widths=(32,),
        training=SMALL_RECIPE.changed(steps=1000),
        arms=("mamba2", "mamba2_smat_d2"),
    ),
    "standard": RecallPreset(
        reduced="128 tokens, one load (T = 64, 8 pairs), width 32, Mamba-2 forms, "
        "3,000 steps of 64 examples",
        task=SMALL,
        widths=(32,),
        training=SMALL_RECIPE,
        arms=("mamba2", "mamba2_log_linear", "mamba2_smat_d2", "mamba2_smat_d3"),
    ),
    "paper": RecallPreset(
        reduced="as in the paper: 32 epochs of 180,000 examples, three seeds",
        task=MQAR(shuffle_batches=True),
        widths=WIDTHS,
        training=RECIPE,
        seeds=(123, 456, 789),
    ),
}


def two_layers(mixer: str, width: int, **options: Any) -> ModelConfig:
    """Return a model with heads of dimension 16.

    >>> two_layers("mamba2_smat", 32, vc_dim=3, **MAMBA2).options["vc_dim"]
    3
    """
    options = {"head_dim": 16, **options}
    return ModelConfig(mixer=mixer, width=width, num_layers=2, options=options, tied=True)


def delta_options(width: int) -> dict[str, Any]:
    """Return the options of Gated DeltaNet in a model of this width."""
    return {"num_heads": DELTA_HEADS.get(width, max(1, width // 32)), "expand_v": 1.0}


def recall_arms(task: Task, width: int, training: TrainingConfig) -> dict[str, Arm]:
    """Return the rows that this table and joint recall have in common."""
    balanced = training.changed(balance_weight=0.01)
    delta = delta_options(width)

    def arm(label: str, mixer: str, options: dict[str, Any]) -> Arm:
        return Arm(label, task, two_layers(mixer, width, **options), training)

    def smat(label: str, mixer: str, options: dict[str, Any], vc_dim: int) -> Arm:
        model = two_layers(mixer, width, **options, vc_dim=vc_dim)
        return Arm(f"{label} + SMat (d = {vc_dim})", task, model, balanced)

    log_linear = arm("Gated DeltaNet, Log-Linear", "gated_deltanet_log_linear", delta)
    return {
        "gated_deltanet": arm("Gated DeltaNet", "gated_deltanet", delta),
        "gated_deltanet_log_linear": log_linear,
        "gated_deltanet_smat_d2": smat("Gated DeltaNet", "gated_deltanet_smat", delta, 2),
        "gated_deltanet_smat_d3": smat("Gated DeltaNet", "gated_deltanet_smat", delta, 3),
        "gated_deltanet_smat_d4": smat("Gated DeltaNet", "gated_deltanet_smat", delta, 4),
        "mamba2": arm("Mamba-2", "mamba2", MAMBA2),
        "mamba2_log_linear": arm("Mamba-2, Log-Linear", "mamba2_log_linear", MAMBA2),
        "mamba2_smat_d2": smat("Mamba-2", "mamba2_smat", MAMBA2, 2),
        "mamba2_smat_d3": smat("Mamba-2", "mamba2_smat", MAMBA2, 3),
        "mamba2_smat_d4": smat("Mamba-2", "mamba2_smat", MAMBA2, 4),
    }


def runs(preset: str, seeds: Seeds = None) -> list[Run]:
    """Return the runs of a preset."""
    size = PRESETS[preset]
    cells = {f"width={w}": recall_arms(size.task, w, size.training) for w in size.widths}
    return size.runs("mqar", preset, cells, seeds)


MQAR_TABLE = Experiment(
    name="mqar",
    title="Multi-query associative recall",
    published="tab:mqar-results",
    arms={name: arm.label for name, arm in recall_arms(MQAR(), 16, RECIPE).items()},
    cells={f"width={width}": f"width {width}" for width in WIDTHS},
    presets={name: preset.reduced for name, preset in PRESETS.items()},
    runs=runs,
    describe=DESCRIBE,
)
