"""Joint context-key recall (tab:joint_recall): a value is found by a context and a key together."""

from __future__ import annotations

from smat.experiments.run import Arm, Experiment, Preset
from smat.experiments.tables import mqar
from smat.experiments.tables.mqar import MAMBA2, delta_options, recall_arms, two_layers
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
RECIPE = mqar.RECIPE.changed(steps=32 * JointRecall().steps_per_epoch(256), learning_rate=3e-3)
SMALL_RECIPE = RECIPE.changed(steps=3000, batch_size=64, eval_every=500)


def cells(task: JointRecall, width: int, training: TrainingConfig) -> dict[str, dict[str, Arm]]:
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
    return {"accuracy": rows}


JOINT_RECALL = Experiment.of_presets(
    name="joint-recall",
    title="Joint context-key recall",
    published="tab:joint_recall, tab:mom_macro",
    cells={"accuracy": "accuracy"},
    presets={
        "quick": Preset(
            "loads of 4 and 16 bindings, width 32, Mamba-2 alone and with d = 2, 300 steps of 64",
            cells(
                JointRecall(loads=((1, 4), (2, 8)), num_validation=500),
                width=32,
                training=SMALL_RECIPE.changed(steps=300),
            ),
            arms=("mamba2", "mamba2_smat_d2"),
        ),
        "standard": Preset(
            "loads of 4, 16 and 32 bindings, width 32, Mamba-2 forms, 3,000 steps of 64",
            cells(
                JointRecall(loads=((1, 4), (2, 8), (4, 8)), num_validation=500),
                width=32,
                training=SMALL_RECIPE,
            ),
            arms=("mamba2", "mamba2_log_linear", "mamba2_smat_d2", "mamba2_smat_d3"),
        ),
        "paper": Preset(
            "as in the paper: five loads, 32 epochs of 180,000 examples, three seeds, in fp32",
            cells(JointRecall(), width=64, training=RECIPE),
            seeds=(123, 456, 789),
        ),
    },
    describe=DESCRIBE,
)
