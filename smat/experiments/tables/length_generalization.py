"""Length generalisation (tab:mqar-uniform, tab:mqar-placed): boundaries past the trained length."""

from __future__ import annotations

from smat.experiments.run import Arm, Experiment, Preset
from smat.models import ModelConfig
from smat.tasks import LengthRecall
from smat.training import TrainingConfig

DESCRIBE = """\
One model an arm, trained at one length and evaluated at longer ones: linear attention with a \
scalar decay of recent keys under the mask of d = 2 (one row shows the decay of distant keys \
too), tokens filed under a random hash of the token before them, fixed for a seed, with the \
geometry of the training length throughout. Arms differ in the boundary n(t) alone: none, kept \
at half of the training length, rebuilt at half of each length (trained as kept), doubling, and \
stepped windows with a step of an eighth or a quarter of the training length. The paper leaves \
nearly all else open; chosen: two layers of width 64, heads and states of 16, short convolution \
4, AdamW at 1e-3, weight decay 0.1, batch 32, 10,000 steps, 64 pairs with keys, values and noise \
of 256 tokens each."""

RECIPE = TrainingConfig(
    steps=10_000, batch_size=32, learning_rate=1e-3, optimizer="adamw", weight_decay=0.1,
    schedule="cosine",
)  # fmt: skip
SMALL_RECIPE = RECIPE.changed(learning_rate=2e-3, eval_every=250)
# Boundaries by the names of the models' `boundary` option, which are the names of the arms too.
LABELS = {
    "none": "no boundary",
    "kept": "kept",
    "rebuilt": "rebuilt",
    "doubling": "doubling",
    "window_8": "window, T/8",
    "window_4": "window, T/4",
}
PAPER = LengthRecall()
QUICK = LengthRecall(
    seq_len=128, num_pairs=8, eval_lengths=(128, 256, 512), placed_length=512,
    gaps=(0, 32, 128, 446), region=32, num_keys=64, num_values=64, num_noise=64, num_eval=64,
)  # fmt: skip
STANDARD = LengthRecall(
    seq_len=128, num_pairs=16, eval_lengths=(128, 256, 512, 1024), placed_length=1024,
    gaps=(0, 32, 128, 958), region=32, num_keys=64, num_values=64, num_noise=64, num_eval=64,
)  # fmt: skip


def cells(task: LengthRecall, training: TrainingConfig) -> dict[str, dict[str, Arm]]:
    """Return one column: each run fills all cells of its row."""
    options = {"num_heads": 4, "vc_dim": 2, "decay_gate": True, "conv_size": 4}
    rows: dict[str, Arm] = {}
    for name, label in LABELS.items():
        chosen = options | {"boundary": name}
        for row, text, scope in (
            (name, label, "recurrent"),
            (f"{name}_decay_all", f"{label}, distant keys decay too", "all"),
        ):
            if scope == "recurrent" or name == "kept":
                scoped = chosen | {"decay_scope": scope}
                model = ModelConfig(mixer="smat_schedule", width=64, num_layers=2, options=scoped)
                rows[row] = Arm(text, task, model, training, revision=2)  # hash tables by seed
    return {"all": rows}


LENGTH_GENERALIZATION = Experiment.of_presets(
    name="length-generalization",
    title="Length generalisation",
    published="tab:mqar-uniform, tab:mqar-placed",
    cells={f"T={length}": f"T = {length}" for length in PAPER.eval_lengths}
    | {f"D={gap}": f"D = {gap}" for gap in PAPER.gaps},
    presets={
        "quick": Preset(
            "trained at T = 128 with 8 pairs for 300 steps, evaluated up to 512; kept and T/4",
            cells(QUICK, SMALL_RECIPE.changed(steps=300)),
            arms=("kept", "window_4"),
        ),
        "standard": Preset(
            "trained at T = 128 with 16 pairs for 1,500 steps, evaluated up to 1024",
            cells(STANDARD, SMALL_RECIPE.changed(steps=1500)),
            seeds=(0, 1, 2),
        ),
        "paper": Preset(
            "as in the paper: trained at T = 1024 with 64 pairs, evaluated up to 8192",
            cells(PAPER, RECIPE),
            seeds=(0, 1, 2),
        ),
    },
    describe=DESCRIBE,
)
