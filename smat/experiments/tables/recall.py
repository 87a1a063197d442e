"""Recall by a key (tab:mqar-results), and by a context and a key together (tab:joint_recall)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from smat.experiments.run import Arm, Experiment, Preset
from smat.models import ModelConfig
from smat.tasks import MQAR, JointRecall, Task
from smat.training import TrainingConfig

DESCRIBE = """\
Two mixer layers with RMSNorm and residual, no MLP and no positions, head and state dimension \
16, short convolution 4, tied read-out. Mamba-2 with expansion 2; Gated DeltaNet with 1, 2, 2 \
heads for widths 16, 32, 64, values as wide as keys and an output gate. SMat is the learned \
four-read form with one hash and one scorer for every field size, and the balance loss at 0.01 \
annealed over 1,000 steps. AdamW at 1e-2 with weight decay 0.1 on matrices, clipping at 1, \
cosine to a tenth, batch 256 (the paper's appendix; the trainer of its data pipeline clips \
nothing and decays everything), batches of all loads in random order. The accuracy is that of \
the last step on the test split, averaged over queries, examples and the five loads. The paper \
trains in bf16; here it is fp32 unless `--precision bf16` asks for it."""

JOINT_DESCRIBE = """\
The two-layer models of multi-query recall at width 64, AdamW at 3e-3 with weight decay 0.1, \
batch 256, 32 epochs, cosine to a tenth and clipping at 1 as the paper's appendix has it. The \
accuracy is the last step's, the equal mean over loads: on the validation split, as in the \
paper's table of joint recall, and on the test split, as in its table of mixtures of memories; \
every row has both. The paper trains in bf16; here it is fp32 unless `--precision bf16` asks for \
it. SMat adds parameters (a scorer for every field size), so each backbone also appears widened \
until it has as many as with d = 3; and the best guess from one field of the query alone is \
among the controls. The mixtures of memories take the updates of Gated DeltaNet in the four \
memories that a router chooses for each token, as many in all as d = 3 has profiles, or profiles \
and types; no memory is shared, nothing is reset."""

WIDTHS = (16, 32, 64)
DELTA_HEADS = {16: 1, 32: 2, 64: 2}  # heads of dimension 16 of Gated DeltaNet, by width
MAMBA2: dict[str, Any] = {"state_dim": 16, "expand": 2}
RECIPE = TrainingConfig(
    steps=32 * MQAR().steps_per_epoch(256), batch_size=256, learning_rate=1e-2, optimizer="adamw",
    weight_decay=0.1, schedule="cosine",
)  # fmt: skip
SMALL = MQAR(vocab_size=128, train_loads=((64, 8, 64_000),), eval_loads=((64, 8),), num_eval=500)
SMALL_RECIPE = RECIPE.changed(steps=3000, batch_size=64, eval_every=250)
MATCHED_WIDTH = 168  # of both backbones: within 1 % of the parameters of d = 3
JOINT_RECIPE = RECIPE.changed(steps=32 * JointRecall().steps_per_epoch(256), learning_rate=3e-3)
JOINT_SMALL_RECIPE = JOINT_RECIPE.changed(steps=3000, batch_size=64, eval_every=500)


def two_layers(mixer: str, width: int, **options: Any) -> ModelConfig:
    """Return a model with heads of dimension 16."""
    options = {"head_dim": 16, **options}
    return ModelConfig(mixer=mixer, width=width, num_layers=2, options=options, tied=True)


def delta_options(width: int) -> dict[str, Any]:
    """Return the options of Gated DeltaNet in a model of this width."""
    return {"num_heads": DELTA_HEADS.get(width, max(1, width // 32)), "expand_v": 1.0}


def recall_arms(task: Task, width: int, training: TrainingConfig) -> dict[str, Arm]:
    """Return the rows that both tables have: a backbone, its log-linear form, with SMat."""
    balanced = training.changed(balance_weight=0.01)
    rows: dict[str, Arm] = {}
    marked = 2  # revision: weights of levels and the hash's gain do not decay any more
    for name, label, options in (
        ("gated_deltanet", "Gated DeltaNet", delta_options(width)),
        ("mamba2", "Mamba-2", MAMBA2),
    ):
        rows[name] = Arm(label, task, two_layers(name, width, **options), training)
        log_linear = two_layers(f"{name}_log_linear", width, **options)
        label_levels = f"{label}, Log-Linear"
        rows[f"{name}_log_linear"] = Arm(label_levels, task, log_linear, training, marked)
        for d in (2, 3, 4):
            model = two_layers(f"{name}_smat", width, **options, vc_dim=d)
            with_memory = f"{label} + SMat (d = {d})"
            rows[f"{name}_smat_d{d}"] = Arm(with_memory, task, model, balanced, marked)
    return rows


def joint_cells(
    task: JointRecall, width: int, training: TrainingConfig
) -> dict[str, dict[str, Arm]]:
    """Return the rows of multi-query recall, backbones with matched parameters, and mixtures."""
    balanced = training.changed(balance_weight=0.01)
    rows = recall_arms(task, width, training)
    for name, options in (("gated_deltanet", delta_options(width)), ("mamba2", MAMBA2)):
        label = f"{rows[name].label}, parameters matched"
        model = two_layers(name, MATCHED_WIDTH, **options)
        rows[f"{name}_matched"] = Arm(label, task, model, training)
    for name, amount, count_types in (
        ("mom_profile", "profiles of d = 3", 0),
        ("mom_storage", "profiles and types", 1),
    ):
        label = f"Mixture of memories, as many as {amount}"
        options = {"num_heads": 2, "vc_dim": 3, "count_types": count_types}
        rows[name] = Arm(label, task, two_layers("mixture_of_memories", width, **options), balanced)
    # Revision 3: scored on both splits; before, on the test split alone.
    return {"accuracy": {name: replace(row, revision=3) for name, row in rows.items()}}


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
            "as in the paper: 32 epochs of 180,000 examples, three seeds, but in fp32 (bf16: "
            "--precision bf16)",
            {f"width={w}": recall_arms(MQAR(shuffle_batches=True), w, RECIPE) for w in WIDTHS},
            seeds=(123, 456, 789),
        ),
    },
    describe=DESCRIBE,
)
JOINT_RECALL = Experiment.of_presets(
    name="joint-recall",
    title="Joint context-key recall",
    published="tab:joint_recall, tab:mom_macro",
    cells={"accuracy": "validation", "test": "test"},
    presets={
        "quick": Preset(
            "loads of 4 and 16 bindings, width 32, Mamba-2 alone and with d = 2, 300 steps of 64",
            joint_cells(
                JointRecall(loads=((1, 4), (2, 8)), num_validation=500),
                width=32,
                training=JOINT_SMALL_RECIPE.changed(steps=300),
            ),
            arms=("mamba2", "mamba2_smat_d2"),
        ),
        "standard": Preset(
            "loads of 4, 16 and 32 bindings, width 32, Mamba-2 forms, 3,000 steps of 64",
            joint_cells(
                JointRecall(loads=((1, 4), (2, 8), (4, 8)), num_validation=500),
                width=32,
                training=JOINT_SMALL_RECIPE,
            ),
            arms=("mamba2", "mamba2_log_linear", "mamba2_smat_d2", "mamba2_smat_d3"),
        ),
        "paper": Preset(
            "as in the paper: five loads, 32 epochs of 180,000 examples, three seeds, but in fp32 "
            "(bf16: --precision bf16)",
            joint_cells(JointRecall(), width=64, training=JOINT_RECIPE),
            seeds=(123, 456, 789),
        ),
    },
    describe=JOINT_DESCRIBE,
)
