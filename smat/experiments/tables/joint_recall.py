"""Joint context-key recall (tab:joint_recall): a value is found by a context and a key together."""

from __future__ import annotations

from smat.experiments.run import Arm, Experiment, Run, Seeds
from smat.experiments.tables.mqar import (
    MAMBA2,
    RecallPreset,
    delta_options,
    recall_arms,
    two_layers,
)
from smat.tasks import JointRecall
from smat.training import TrainingConfig

DESCRIBE = """\
The two-layer models of multi-query recall at width 64, AdamW at 3e-3 with weight decay 0.1, batch \
256, 32 epochs, cosine to a tenth and clipping at 1 as the paper's appendix has it. The accuracy \
is the last step's, the equal mean over loads. SMat adds parameters (a scorer for every field \
size), so each backbone also appears widened until it has as many as with d = 3; and the best \
guess from one field of the query alone is among the controls. The mixtures of memories take the \
updates of Gated DeltaNet in the four memories that a router chooses for each token, as many in \
all as d = 3 has profiles, or profiles and types; no memory is shared, nothing is reset."""

MATCHED_WIDTH = 168  # of both backbones: within 1 % of the parameters of d = 3
RECIPE = TrainingConfig(
    steps=32 * JointRecall().steps_per_epoch(256),
    batch_size=256,
    learning_rate=3e-3,
    optimizer="adamw",
    weight_decay=0.1,
    schedule="cosine",
)
SMALL_RECIPE = RECIPE.changed(steps=3000, batch_size=64, eval_every=500)
PRESETS = {
    "quick": RecallPreset(
        reduced="loads of 4 and 16 bindings, width 32, Mamba-2 alone and with d = 2, "
        "300 steps of 64",
        task=JointRecall(loads=((1, 4), (2, 8)), num_validation=500),
        widths=(32,),
        training=SMALL_RECIPE.changed(steps=300),
        arms=("mamba2", "mamba2_smat_d2"),
    ),
    "standard": RecallPreset(
        reduced="loads of 4, 16 and 32 bindings, width 32, Mamba-2 forms, 3,000 steps of 64",
        task=JointRecall(loads=((1, 4), (2, 8), (4, 8)), num_validation=500),
        widths=(32,),
        training=SMALL_RECIPE,
        arms=("mamba2", "mamba2_log_linear", "mamba2_smat_d2", "mamba2_smat_d3"),
    ),
    "paper": RecallPreset(
        reduced="as in the paper: five loads, 32 epochs of 180,000 examples, three seeds, in fp32",
        task=JointRecall(),
        widths=(64,),
        training=RECIPE,
        seeds=(123, 456, 789),
    ),
}


def arms(preset: RecallPreset) -> dict[str, Arm]:
    """Return the rows of the table: those of multi-query recall, matched backbones, mixtures."""
    (width,), task, training = preset.widths, preset.task, preset.training
    balanced = training.changed(balance_weight=0.01)
    wide_delta = two_layers("gated_deltanet", MATCHED_WIDTH, **delta_options(width))
    wide_mamba2 = two_layers("mamba2", MATCHED_WIDTH, **MAMBA2)

    def mixture(label: str, count_types: int) -> Arm:
        model = two_layers(
            "mixture_of_memories", width, num_heads=2, vc_dim=3, count_types=count_types
        )
        return Arm(f"Mixture of memories, as many as {label}", task, model, balanced)

    return {
        **recall_arms(task, width, training),
        "gated_deltanet_matched": Arm(
            "Gated DeltaNet, parameters matched", task, wide_delta, training
        ),
        "mamba2_matched": Arm("Mamba-2, parameters matched", task, wide_mamba2, training),
        "mom_profile": mixture("profiles of d = 3", count_types=0),
        "mom_storage": mixture("profiles and types", count_types=1),
    }


def runs(preset: str, seeds: Seeds = None) -> list[Run]:
    """Return the runs of a preset."""
    cells = {"accuracy": arms(PRESETS[preset])}
    return PRESETS[preset].runs("joint-recall", preset, cells, seeds)


JOINT_RECALL = Experiment(
    name="joint-recall",
    title="Joint context-key recall",
    published="tab:joint_recall, tab:mom_macro",
    arms={name: arm.label for name, arm in arms(PRESETS["paper"]).items()},
    cells={"accuracy": "accuracy"},
    presets={name: preset.reduced for name, preset in PRESETS.items()},
    runs=runs,
    describe=DESCRIBE,
)
